"""Every kernel of decoding computes what its plain twin computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llamarl.generate.cache import attend_pages
from llamarl.generate.sampling import Knobs, least_kept, sample_tokens, seed_state, uniform_draws
from llamarl.generate.slots import Opening, SlotState

pytestmark = pytest.mark.gpu
SEED = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "size"),
    [(5, 4, 2, 8), (1, 8, 8, 64), (300, 8, 2, 64), (40, 14, 2, 64), (9, 32, 8, 128)],
)
def test_attention_over_pages(
    rows: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    from llamarl.generate import kernels

    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    page, width = 16, 21
    keys, values = normal(kv_heads, rows * width + 1, page, size), normal(kv_heads, rows * width + 1, page, size)
    slots_B = torch.randperm(rows, device=device, generator=generator)
    order = torch.randperm(rows * width, device=device, generator=generator) + 1
    table_SP = order.view(rows, width).to(torch.int32)
    positions_B = torch.randint(0, page * width, (rows,), device=device, generator=generator)
    positions_B[0] = 0
    positions_B[-1] = page * width - 1
    qkv = normal(rows, 1, (heads + 2 * kv_heads) * size)
    q, k, v = (
        part.view(rows, 1, -1, size)
        for part in torch.split(qkv, [heads * size, kv_heads * size, kv_heads * size], dim=-1)
    )
    table_BP = table_SP[slots_B].long()
    pages_B, within_B = table_BP.gather(1, positions_B[:, None] // page)[:, 0], positions_B % page
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[:, pages_B, within_B] = k[:, 0].transpose(0, 1)
    expected_values[:, pages_B, within_B] = v[:, 0].transpose(0, 1)
    mask = (torch.arange(page * width, device=device)[None] <= positions_B[:, None])[:, None, None]
    expected = attend_pages(q.float(), expected_keys.float(), expected_values.float(), table_BP, mask)
    found = kernels.attend_pages(q, k, v, keys, values, table_SP, slots_B, positions_B)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
    torch.testing.assert_close(found.float(), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


def open_slots(rows: int, device: torch.device, temperatures: list[float], filters: bool) -> SlotState:
    state = SlotState(rows, 6, (3, 5), device)
    knobs = [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (50, 0.9, 0.05), (1, 1.0, 0.0)]
    state.open(
        [
            Opening(
                slot=slot,
                ordinal=slot * 17,
                sample=slot % 5,
                token=1,
                position=4,
                count=slot % 3,
                limit=1 + slot % 4,
                temperature=temperatures[slot % len(temperatures)],
                top_k=knobs[slot % 6][0] if filters else 0,
                top_p=knobs[slot % 6][1] if filters else 1.0,
                min_p=knobs[slot % 6][2] if filters else 0.0,
            )
            for slot in range(0, rows, 2 if rows > 20 else 1)
        ]
    )
    return state


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("vocabulary", [17, 4096, 5001, 128_256])
def test_sampling_and_the_bookkeeping_of_slots(vocabulary: int, filtered: bool, device: torch.device) -> None:
    from llamarl.generate import kernels

    rows, temperatures = 64, [0.0, 0.7, 1.0, 1.3]
    logits_BV = 3 * torch.randn(
        rows, vocabulary, device=device, generator=torch.Generator(device=device).manual_seed(vocabulary)
    )
    ours, twin = (open_slots(rows, device, temperatures, filtered) for _ in range(2))
    slots_B = torch.arange(rows - 1, -1, -1, device=device)
    draws_B = uniform_draws(SEED, twin.ordinals[slots_B], twin.samples[slots_B], twin.counts[slots_B])
    tokens_B, logprobs_B = sample_tokens(logits_BV, draws_B, twin.knobs(slots_B, filtered=filtered))
    twin.advance(slots_B, tokens_B, logprobs_B)
    kernels.sample_and_advance(logits_BV, slots_B, ours, seed_state(SEED), filtered=filtered)
    # A draw may fall so near the border of two tokens that fp32 and float64 sums differ.
    same = (ours.out_tokens == twin.out_tokens).all(dim=1)
    assert same.float().mean() >= 1 - 1 / rows
    torch.testing.assert_close(ours.out_logprobs[same], twin.out_logprobs[same], atol=1e-4, rtol=0)
    for name in ("active", "counts", "positions", "tokens", "out_versions"):
        assert torch.equal(getattr(ours, name)[same], getattr(twin, name)[same]), name


@pytest.mark.parametrize("vocabulary", [17, 5001, 32_000])
def test_what_the_filters_leave(vocabulary: int, device: torch.device) -> None:
    from llamarl.generate import kernels

    rows = 24
    state = open_slots(rows, device, [0.6, 1.0, 1.5], True)
    logits_BV = 2 * torch.randn(
        rows, vocabulary, device=device, generator=torch.Generator(device=device).manual_seed(1)
    )
    logits_BV[:, 1] = logits_BV[:, 2]  # equals share their fate
    slots_B = torch.arange(rows, device=device)
    state.temperatures[:rows] = torch.where(state.temperatures[:rows] == 0, 1.0, state.temperatures[:rows])
    knobs: Knobs = state.knobs(slots_B, filtered=True)
    assert knobs.filters is not None
    scaled_BV = logits_BV / knobs.temperatures_B[:, None]
    expected_B = least_kept(scaled_BV, *knobs.filters)
    found_B = kernels.least_kept(logits_BV, slots_B, state)
    kept, expected = scaled_BV >= found_B[:, None], scaled_BV >= expected_B[:, None]
    assert (kept.sum(1) - expected.sum(1)).abs().max() <= 1  # a border of top-p, where sums round
    assert (kept == expected).all(dim=1).float().mean() > 0.9
