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
        )._replace(cut=cut)
    qkv = normal(rows, 1, (heads + 2 * kv_heads) * size)
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    q, k, v = (part.view(rows, 1, -1, size) for part in torch.split(qkv, sizes, dim=-1))
    rope = rope_up_to(shape_of(heads, kv_heads, size, rotated), page * width, device)

    positions_B, table_BP = positions_S[slots_B], table_SP[slots_B].long()
    at = tuple(part[positions_B][:, None] for part in rope)
    pages_B, within_B = table_BP.gather(1, positions_B[:, None] // page)[:, 0], positions_B % page
    twin.keys(0).put(pages_B, within_B, ops.rotate(k, at)[:, 0])
    twin.values(0).put(pages_B, within_B, v[:, 0])
    mask = seen(positions_B[:, None, None, None], torch.arange(page * width, device=device), options.window)
    turned = ops.rotate(q, at).float()
    expected = attend_pages(turned, _wide(twin.keys(0)), _wide(twin.values(0)), table_BP, mask, options)
    where = table_SP, slots_B, positions_S, rope, readings
    found = attention_kernels.attend_pages(
        (q, k, v), ours.keys(0), ours.values(0), *where, parts=parts, options=options
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
