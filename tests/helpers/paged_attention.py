"""Decode attention over pages: the kernels against their plain twin. As a program, in Triton's interpreter on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.testing import assert_close

from llamarl.generate.attention import Readings, attend_pages, members_of_reading
from llamarl.generate.kv_cache import PagedCache, Pages
from llamarl.generate.kv_splits import SharedCut
from llamarl.model import ops
from llamarl.model.plain_attention import seen
from llamarl.model.quantize import FP8
from llamarl.model.rope import rope_up_to
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions, ModelSpec

SHORT = SharedCut()


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
    cut: SharedCut = SHORT,
    options: AttentionOptions = PLAIN_ATTENTION,
    rotated: int = 0,
) -> None:
    """Query and key are turned, key and value written, and everything up to there attended to. With sharing, every three rows
    (the last may be alone) begin with the same pages, which are more than one block."""
    from llamarl.generate import attention_kernels

    (heads, kv_heads, size), (page, width) = model, pages
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    num_pages = rows * width + 1
    ours, twin = two_caches(heads, kv_heads, size, num_pages, page, dtype, narrow, generator)
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
        )._replace(cut=cut)
    qkv = normal(rows, 1, (heads + 2 * kv_heads) * size)
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    q, k, v = (part.view(rows, 1, -1, size) for part in torch.split(qkv, sizes, dim=-1))
    rope = rope_up_to(shape_of(heads, kv_heads, size, rotated), page * width, device)

    rows_at = positions_S[slots_B], table_SP[slots_B].long(), rope
    write(twin, k, v, *rows_at)
    expected = attended(twin, q, *rows_at, options)
    where = table_SP, slots_B, positions_S, rope, readings
    found = attention_kernels.attend_pages(
        (q, k, v), ours.keys(0), ours.values(0), *where, parts=parts, options=options
    )

    (assert_rounded_alike if narrow else assert_equal_contents)(ours, twin)
    assert_near(found, expected)


def prompt_attention_agrees(
    tokens: int,
    before: int,
    model: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    narrow: bool,
    *,
    page: int = 16,
    how: tuple[int, ...] | None = None,
    options: AttentionOptions = PLAIN_ATTENTION,
    rotated: int = 0,
) -> None:
    """Tokens of one sequence that follow `before` others: as if each were the new token of a row, all written first."""
    from llamarl.generate import prompt_kernels

    heads, kv_heads, size = model
    generator = torch.Generator(device=device).manual_seed(0)
    width = (before + tokens - 1) // page + 1
    ours, twin = two_caches(heads, kv_heads, size, width + 2, page, dtype, narrow, generator)
    table_P = torch.randperm(width, device=device, generator=generator).to(torch.int32) + 1
    table_MP, rows_M = table_P.expand(tokens, -1), torch.arange(tokens, device=device)
    qkv = torch.randn(tokens, 1, (heads + 2 * kv_heads) * size, generator=generator, device=device).to(dtype)
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    q, k, v = (part.view(tokens, 1, -1, size) for part in torch.split(qkv, sizes, dim=-1))
    rope = rope_up_to(shape_of(heads, kv_heads, size, rotated), page * width, device)
    where = table_MP, rows_M, before + rows_M, rope
    tiling = None if how is None else prompt_kernels.PromptTiling(*how)
    found = prompt_kernels.attend_prompt((q, k, v), ours.keys(0), ours.values(0), *where, how=tiling, options=options)
    write(twin, k, v, before + rows_M, table_MP.long(), rope)
    if narrow:
        if device.type == "cuda":  # Triton's interpreter rounds to fp8 carelessly
            assert_rounded_alike(ours, twin)
        for mine, theirs in zip(ours.tensors, twin.tensors, strict=True):
            theirs.copy_(mine)
    expected = attended(twin, q, before + rows_M, table_MP.long(), rope, options)
    assert_equal_contents(ours, twin)
    assert_near(found, expected)


def two_caches(
    heads: int,
    kv_heads: int,
    size: int,
    num_pages: int,
    page: int,
    dtype: torch.dtype,
    narrow: bool,
    generator: torch.Generator,
) -> tuple[PagedCache, PagedCache]:
    """Two caches with the same random contents."""
    shape, device = shape_of(heads, kv_heads, size), generator.device
    everywhere = torch.arange(num_pages * page, device=device)
    filled = torch.randn(len(everywhere), kv_heads, size, generator=generator, device=device).to(dtype)
    first, second = (
        PagedCache(shape, num_pages, page, dtype=FP8 if narrow else dtype, device=device) for _ in range(2)
    )
    for cache in (first, second):
        cache.keys(0).put(everywhere // page, everywhere % page, filled)
        cache.values(0).put(everywhere // page, everywhere % page, filled.flip(0))
    return first, second


def write(
    cache: PagedCache, k_B1KD: Tensor, v_B1KD: Tensor, positions_B: Tensor, table_BP: Tensor, rope: ops.Rope
) -> None:
    """Write the key, rotated, and the value of each row to its page."""
    at = tuple(part[positions_B][:, None] for part in rope)
    page = cache.page_tokens
    pages_B, within_B = table_BP.gather(1, positions_B[:, None] // page)[:, 0], positions_B % page
    cache.keys(0).put(pages_B, within_B, ops.rotate(k_B1KD, at)[:, 0])
    cache.values(0).put(pages_B, within_B, v_B1KD[:, 0])


def attended(
    cache: PagedCache,
    q_B1HD: Tensor,
    positions_B: Tensor,
    table_BP: Tensor,
    rope: ops.Rope,
    options: AttentionOptions,
) -> Tensor:
    """What plain PyTorch finds in the pages, in fp32."""
    at = tuple(part[positions_B][:, None] for part in rope)
    steps_T = torch.arange(cache.page_tokens * table_BP.shape[1], device=q_B1HD.device)
    mask = seen(positions_B[:, None, None, None], steps_T, options.window)
    turned = ops.rotate(q_B1HD, at).float()
    return attend_pages(turned, _wide(cache.keys(0)), _wide(cache.values(0)), table_BP, mask, options)


def contents(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """All keys and all values, in fp32."""
    everything = torch.arange(cache.keys(0).values_KPTD.shape[1], device=cache.tensors[0].device)[None]
    keys, values = (pages.read(everything, torch.float32).float() for pages in (cache.keys(0), cache.values(0)))
    return keys, values


def assert_rounded_alike(ours: PagedCache, twin: PagedCache) -> None:
    """In fp8, what lies on a border may be rounded to either side of it, an eighth apart; that is rare."""
    for mine, theirs in zip(contents(ours), contents(twin), strict=True):
        assert_close(mine, theirs, atol=1e-6, rtol=0.13)
        apart = (mine - theirs).abs() > 2e-2 * theirs.abs() + 1e-6
        assert apart.float().mean() < 1e-4, f"{apart.sum()} of {apart.numel()} values differ"


def assert_equal_contents(ours: PagedCache, twin: PagedCache) -> None:
    for mine, theirs in zip(contents(ours), contents(twin), strict=True):
        assert_close(mine, theirs, atol=1e-6, rtol=2e-2)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert_close(found.float(), expected, atol=2e-2 if found.dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


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


def shape_of(heads: int, kv_heads: int, size: int, rotated: int = 0) -> ModelSpec:
    return ModelSpec(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rotary_dim=rotated,
        max_positions=512,
    )


def run_interpreted() -> None:
    """Windows of all kinds, softcaps, scales and partial rotation, in small."""
    cpu, some = torch.device("cpu"), (4, (4, 2, 16), (16, 3), torch.float32)
    for window in (1, 2, 17, 33):
        for parts in (0, 2):
            attention_agrees(*some, cpu, narrow=False, parts=parts, options=AttentionOptions(window=window))
    attention_agrees(*some, cpu, narrow=False, options=AttentionOptions(softcap=1.5, scale=0.4))
    attention_agrees(*some, cpu, narrow=False, shared_pages=2, options=AttentionOptions(softcap=1.5))
    for cut in (SharedCut(4), SharedCut(8, block=64)):
        for parts in (0, 2):
            attention_agrees(*some, cpu, narrow=False, shared_pages=2, parts=parts, cut=cut)
    # 300 tokens that are a row's own, in parts too
    attention_agrees(4, (4, 2, 16), (16, 40), torch.float32, cpu, narrow=False, shared_pages=20)
    attention_agrees(*some, cpu, narrow=False, options=AttentionOptions(window=20, softcap=1.5, scale=0.4))
    for rotated in (4, 12):
        attention_agrees(*some, cpu, narrow=False, rotated=rotated)
    for tokens, before in ((1, 0), (7, 0), (5, 90), (40, 37)):
        for parts in (0, 1, 4):
            prompt_attention_agrees(
                tokens, before, (4, 2, 16), torch.float32, cpu, narrow=False, how=(16, 32, 4, 2, parts)
            )
    prompt_attention_agrees(9, 70, (6, 2, 24), torch.float32, cpu, narrow=False, page=4, rotated=12)
    for options in (AttentionOptions(window=1), AttentionOptions(window=20, softcap=1.5, scale=0.4)):
        prompt_attention_agrees(
            30, 50, (4, 2, 16), torch.float32, cpu, narrow=False, how=(16, 16, 4, 2), options=options
        )
    # A token's heads in two tiles, which see different parts through the window.
    for narrow in (False, True):
        options, tiling = AttentionOptions(window=17, softcap=1.5), (16, 16, 4, 2, 4)
        prompt_attention_agrees(33, 70, (7, 1, 16), torch.float32, cpu, narrow, how=tiling, options=options)
        prompt_attention_agrees(20, 50, (4, 2, 16), torch.float32, cpu, narrow)
    operations_agree(cpu)


def operations_agree(device: torch.device) -> None:
    """The kernels of small operations that only some families have."""
    from llamarl.model import kernels

    generator = torch.Generator(device=device).manual_seed(0)
    x, weight = (torch.randn(size, generator=generator, device=device) for size in ((3, 5, 40), (40,)))
    assert_close(kernels.rms_norm(x, weight, 1e-6, plus_one=True), ops.rms_norm(x, weight, 1e-6, plus_one=True))
    terms, expected = kernels.Terms(torch.randn(2, 15, 40, generator=generator, device=device)), x.clone()
    kernels.add_terms(expected.view(15, 40), terms)
    found = kernels.add_and_norm(x.clone().view(15, 40), terms, weight, 1e-6, plus_one=True)
    assert_close(found, ops.rms_norm(expected, weight, 1e-6, plus_one=True).view(15, 40))
    assert_close(kernels.silu_times(x, gelu=True), ops.gelu_times(x))
    heads = torch.randn(2, 5, 3, 16, generator=generator, device=device)
    rope = rope_up_to(shape_of(3, 3, 16, 12), 5, device)
    table = tuple(part[None].expand(2, -1, -1, -1) for part in rope)
    assert_close(kernels.rotate(heads, table), ops.rotate(heads, table))


if __name__ == "__main__":
    run_interpreted()
