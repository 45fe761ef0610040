"""Every kernel of decoding computes what its plain twin computes."""

from __future__ import annotations

import pytest
import torch
from helpers.paged_attention import attention_agrees, operations_agree, prompt_attention_agrees, shape_of

from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.kv_splits import SharedCut
from llamarl.generate.sampling import filter_threshold, sample_tokens, seed_state, uniform_draws
from llamarl.generate.slots import Opening, SlotState
from llamarl.model_spec import AttentionOptions
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


@pytest.mark.parametrize("narrow", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("parts", [0, 4])
@pytest.mark.parametrize("cut", [SharedCut(4), SharedCut(4, block=32), SharedCut(8, block=64), SharedCut(16, block=64)])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "size"), [(32, 32, 8, 128), (300, 8, 2, 64), (9, 12, 2, 128)])
def test_long_shared_pages_are_cut_into_parts(
    rows: int, heads: int, kv_heads: int, size: int, cut: SharedCut, parts: int, narrow: bool, device: torch.device
) -> None:
    attention_agrees(
        rows, (heads, kv_heads, size), (16, 130), torch.bfloat16, device, narrow, 100, parts=parts, cut=cut
    )


OPTIONS = {
    "window": AttentionOptions(window=37),
    "window of one": AttentionOptions(window=1),
    "window of two": AttentionOptions(window=2),
    "window of a block": AttentionOptions(window=17),
    "softcap": AttentionOptions(softcap=2.0),
    "scale": AttentionOptions(scale=0.3),
    "all": AttentionOptions(window=100, softcap=1.5, scale=0.3),
}


@pytest.mark.parametrize("narrow", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("parts", [0, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "size"), [(5, 4, 2, 16), (300, 8, 2, 64), (9, 8, 4, 256)])
def test_windows_softcaps_and_scales(
    rows: int,
    heads: int,
    kv_heads: int,
    size: int,
    options: AttentionOptions,
    parts: int,
    narrow: bool,
    device: torch.device,
) -> None:
    attention_agrees(
        rows, (heads, kv_heads, size), (16, 30), torch.bfloat16, device, narrow, parts=parts, options=options
    )


@pytest.mark.parametrize("narrow", [False, True], ids=["", "fp8"])
def test_a_softcap_where_pages_are_shared(narrow: bool, device: torch.device) -> None:
    options = AttentionOptions(softcap=2.0, scale=0.2)
    attention_agrees(40, (8, 2, 64), (16, 21), torch.bfloat16, device, narrow, 9, options=options)


@pytest.mark.parametrize("narrow", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "before"), [(1, 0), (128, 0), (5, 900), (128, 2043)])
@pytest.mark.parametrize("model", [(4, 2, 16), (8, 8, 64), (14, 2, 64), (32, 8, 128), (12, 2, 128), (8, 4, 256)])
def test_prompts_beside_answers(
    tokens: int, before: int, model: tuple[int, int, int], dtype: torch.dtype, narrow: bool, device: torch.device
) -> None:
    prompt_attention_agrees(tokens, before, model, dtype, device, narrow)


@pytest.mark.parametrize("narrow", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_prompts_beside_answers_in_all_families(options: AttentionOptions, narrow: bool, device: torch.device) -> None:
    prompt_attention_agrees(100, 300, (8, 2, 64), torch.bfloat16, device, narrow, options=options, rotated=48)


def test_operations_of_single_families(device: torch.device) -> None:
    operations_agree(device)


@pytest.mark.parametrize("narrow", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("rotated", [16, 48, 62])
def test_a_part_of_each_head_is_rotated(rotated: int, narrow: bool, device: torch.device) -> None:
    attention_agrees(9, (8, 2, 64), (16, 21), torch.bfloat16, device, narrow, 3, rotated=rotated)


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
