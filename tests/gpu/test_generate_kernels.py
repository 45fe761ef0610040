"""Every kernel of decoding computes what its plain twin computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llamarl.generate.attention import Readings, attend_pages, members_of_reading
from llamarl.generate.kv_cache import PagedCache, Pages
from llamarl.generate.sampling import filter_threshold, sample_tokens, seed_state, uniform_draws
from llamarl.generate.slots import Opening, SlotState
from llamarl.model import ops
from llamarl.model.quantize import FP8
from llamarl.model.rope import rope_up_to
from llamarl.model_spec import ModelSpec
from llamarl.types import Sampling

pytestmark = pytest.mark.gpu
SEED = 3


@pytest.mark.parametrize(
    ("narrow", "sharing"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["", "sharing", "fp8", "fp8 sharing"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page", "width", "shared_pages"), [(16, 21, 9), (64, 6, 3)], ids=["pages of 16", "of 64"])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "size"),
    [(5, 4, 2, 8), (1, 8, 8, 64), (300, 8, 2, 64), (40, 14, 2, 64), (9, 32, 8, 128), (48, 12, 2, 128)],
)
def test_attention_over_pages(
    rows: int,
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    width: int,
    shared_pages: int,
    dtype: torch.dtype,
    narrow: bool,
    sharing: bool,
    device: torch.device,
) -> None:
    attention_agrees(
        rows, (heads, kv_heads, size), (page, width), dtype, device, narrow, shared_pages if sharing else 0
    )


@pytest.mark.parametrize("narrow", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "size"), [(300, 8, 2, 64), (280, 12, 2, 128), (9, 12, 2, 128)])
def test_only_long_sequences_are_cut_into_parts(
    rows: int, heads: int, kv_heads: int, size: int, parts: int, narrow: bool, device: torch.device
) -> None:
    attention_agrees(rows, (heads, kv_heads, size), (16, 130), torch.bfloat16, device, narrow, parts=parts)


def attention_agrees(
    rows: int,
    model: tuple[int, int, int],
    pages: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    narrow: bool,
    shared_pages: int = 0,
    *,
    parts: int = 0,
) -> None:
    """Query and key are turned, key and value written, and everything up to there attended to. With sharing, every three rows
    (the last may be alone) begin with the same pages, which are more than one block."""
    from llamarl.generate import attention_kernels

    (heads, kv_heads, size), (page, width) = model, pages
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    num_pages = rows * width + 1
    ours, twin = (
        PagedCache(shape_of(heads, kv_heads, size), num_pages, page, dtype=FP8 if narrow else dtype, device=device)
        for _ in range(2)
    )
    everywhere = torch.arange(num_pages * page, device=device)
    filled = normal(len(everywhere), kv_heads, size)
    for cache in (ours, twin):
        cache.keys(0).put(everywhere // page, everywhere % page, filled)
        cache.values(0).put(everywhere // page, everywhere % page, filled.flip(0))
    slots_B = torch.randperm(rows, device=device, generator=generator)
    order = torch.randperm(rows * width, device=device, generator=generator) + 1
    table_SP = order.view(rows, width).to(torch.int32)
    positions_S = torch.randint(0, page * width, (rows,), device=device, generator=generator)
    positions_S[0] = 0
    positions_S[-1] = page * width - 1
    readings = None
    if shared_pages:
        readings = share(
            slots_B, table_SP, positions_S, min(3, members_of_reading(heads // kv_heads)), shared_pages, page
        )
    qkv = normal(rows, 1, (heads + 2 * kv_heads) * size)
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    q, k, v = (part.view(rows, 1, -1, size) for part in torch.split(qkv, sizes, dim=-1))
    rope = rope_up_to(shape_of(heads, kv_heads, size), page * width, device)

    positions_B, table_BP = positions_S[slots_B], table_SP[slots_B].long()
    at = tuple(part[positions_B][:, None] for part in rope)
    pages_B, within_B = table_BP.gather(1, positions_B[:, None] // page)[:, 0], positions_B % page
    twin.keys(0).put(pages_B, within_B, ops.rotate(k, at)[:, 0])
    twin.values(0).put(pages_B, within_B, v[:, 0])
    mask = (torch.arange(page * width, device=device)[None] <= positions_B[:, None])[:, None, None]
    turned = ops.rotate(q, at).float()
    expected = attend_pages(turned, _wide(twin.keys(0)), _wide(twin.values(0)), table_BP, mask)
    found = attention_kernels.attend_pages(
        (q, k, v), ours.keys(0), ours.values(0), table_SP, slots_B, positions_S, rope, readings, parts=parts
    )

    for mine, theirs in ((ours.keys(0), twin.keys(0)), (ours.values(0), twin.values(0))):
        everything = torch.arange(num_pages, device=device)[None]
        torch.testing.assert_close(
            mine.read(everything, torch.float32).float(),
            theirs.read(everything, torch.float32).float(),
            atol=1e-6,
            rtol=2e-2,
        )
    torch.testing.assert_close(found.float(), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


def share(
    slots_B: Tensor, table_SP: Tensor, positions_S: Tensor, members: int, num_pages: int, page_tokens: int
) -> Readings:
    """Let neighboring rows begin with the same pages, in place."""
    rows = len(slots_B)
    firsts, counts, skips = torch.zeros(3, rows, dtype=torch.int64, device=slots_B.device)
    positions_S.clamp_(min=num_pages * page_tokens)
    starts = range(0, rows - 1, members)
    for reading, first in enumerate(starts):
        count = min(members, rows - first)
        table_SP[slots_B[first : first + count], :num_pages] = table_SP[slots_B[first], :num_pages].clone()
        if count > 1:
            firsts[reading], counts[reading] = first, count
            skips[first : first + count] = num_pages * page_tokens
    return Readings(firsts, counts, skips)


def _wide(pages: Pages) -> Pages:
    return pages if pages.narrow else Pages(pages.values_KPTD.float(), None)


def shape_of(heads: int, kv_heads: int, size: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        max_positions=512,
    )


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
                sampling=Sampling(
                    max_new_tokens=1 + slot % 4,
                    temperature=temperatures[slot % len(temperatures)],
                    top_k=knobs[slot % 6][0] if filters else 0,
                    top_p=knobs[slot % 6][1] if filters else 1.0,
                    min_p=knobs[slot % 6][2] if filters else 0.0,
                ),
            )
            for slot in range(0, rows, 2 if rows > 20 else 1)
        ]
    )
    return state


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("vocabulary", [17, 4096, 5001, 128_256])
def test_sampling_and_the_bookkeeping_of_slots(vocabulary: int, filtered: bool, device: torch.device) -> None:
    from llamarl.generate import sampling_kernels as kernels

    rows, temperatures = 64, [0.0, 0.7, 1.0, 1.3]
    logits_BV = 3 * torch.randn(
        rows, vocabulary, device=device, generator=torch.Generator(device=device).manual_seed(vocabulary)
    )
    ours, twin = (open_slots(rows, device, temperatures, filtered) for _ in range(2))
    slots_B = torch.arange(rows - 1, -1, -1, device=device)
    draws_B = uniform_draws(SEED, twin.ordinals[slots_B], twin.samples[slots_B], twin.counts[slots_B])
    tokens_B, logprobs_B = sample_tokens(logits_BV, draws_B, twin.sampling_of(slots_B), filtered=filtered)
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
    from llamarl.generate import sampling_kernels as kernels

    rows = 24
    state = open_slots(rows, device, [0.6, 1.0, 1.5], True)
    logits_BV = 2 * torch.randn(
        rows, vocabulary, device=device, generator=torch.Generator(device=device).manual_seed(1)
    )
    logits_BV[:, 1] = logits_BV[:, 2]  # equals share their fate
    slots_B = torch.arange(rows, device=device)
    temperatures = state.sampling["temperature"]
    temperatures[:rows] = torch.where(temperatures[:rows] == 0, 1.0, temperatures[:rows])
    sampling = state.sampling_of(slots_B)
    scaled_BV = logits_BV / sampling["temperature"][:, None]
    expected_B = filter_threshold(scaled_BV, sampling)
    found_B = kernels.filter_threshold(logits_BV, slots_B, state)
    kept, expected = scaled_BV >= found_B[:, None], scaled_BV >= expected_B[:, None]
    assert (kept.sum(1) - expected.sum(1)).abs().max() <= 1  # a border of top-p, where sums round
    assert (kept == expected).all(dim=1).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_written_to_their_pages(dtype: torch.dtype, device: torch.device) -> None:
    from llamarl.generate.page_kernels import write_pages

    rows, tokens, page, kv_heads, size = 3, 32, 4, 2, 24
    ours, twin = (PagedCache(shape_of(4, kv_heads, size), 40, page, dtype=dtype, device=device) for _ in range(2))
    generator = torch.Generator(device=device).manual_seed(0)
    qkv = torch.randn(rows, tokens, 8 * size, generator=generator, device=device).to(dtype)
    k, v = (part.view(rows, tokens, kv_heads, size) for part in (qkv[..., -96:-48], qkv[..., -48:]))
    pages = (1 + torch.randperm(24, generator=generator, device=device)).view(rows, 8).repeat_interleave(page, dim=1)
    write_pages(k, v, ours.keys(0), ours.values(0), pages.flatten())
    within = (torch.arange(tokens, device=device) % page).repeat(rows)
    twin.keys(0).put(pages.flatten(), within, k.flatten(0, 1))
    twin.values(0).put(pages.flatten(), within, v.flatten(0, 1))
    for mine, theirs in zip(ours._parts, twin._parts, strict=True):
        assert theirs.abs().max() > 0
        assert torch.equal(mine, theirs)
