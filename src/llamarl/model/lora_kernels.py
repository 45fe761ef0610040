"""Triton kernels of adapters: for a product, or several joined ones, two launches. Imported only on a GPU.

The first multiplies the input with all A: so few columns that one program for each tile would leave most of a GPU idle, so
the long sum is cut into parts, and the program that ends last adds them up. The second multiplies that with B, each layer's
with its own, and adds to the output in place; of gate and up it also makes the product of both, which reads the output
anyway. Sums are made in a fixed order, so results do not depend on what runs beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.model.kernels import narrowed

_LEAST = 16  # smallest size of a tile's side
_LARGE = 1024  # rows from which torch's product keeps a GPU busy
_MOST_TILES = 4096  # whose sums are made in parts


class Tuning(NamedTuple):
    """Sizes of tiles, measured by `benchmarks/lora_products.py`."""

    shrink_rows: int = 16
    shrink_width: int = 128
    depth: int = 128
    sum_length: int = 512  # terms of a part of the first product's sum
    max_parts: int = 16
    rows: int = 32
    columns: int = 128
    warps: int = 4
    gated_columns: int = 64
    gated_warps: int = 4
    early: bool = True  # kernels start while the one before them ends (programmatic dependent launch)


TUNING = Tuning()
_MOST_LAYERS = 3  # of a joined product


class AdapterTiles(NamedTuple):
    """Tiles of the output of a joined product, none of which belongs to two layers."""

    num_tiles: int
    layers: tuple[int, ...]  # of each: tiles up to its end, first column of the output, end, first row of its B


def tiles_of(columns: Sequence[slice]) -> AdapterTiles:
    """Tiles of layers with these columns of the output; their B lie one behind another."""
    found, tiles, row = list[int](), 0, 0
    for one in columns:
        tiles += triton.cdiv(one.stop - one.start, TUNING.columns)
        found += [tiles, one.start, one.stop, row]
        row += one.stop - one.start
    return AdapterTiles(tiles, tuple(found + found[-4:] * (_MOST_LAYERS - len(columns))))


@triton.jit
def _shrink(
    x_ptr,
    scales_ptr,
    a_ptr,
    parts_ptr,
    counts_ptr,
    out_ptr,
    rows,
    width,
    inner,
    chunk,
    SCALED: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    part = tl.program_id(2)
    row_inside, column_inside = row < rows, column < width
    inside_out = row_inside[:, None] & column_inside[None, :]
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(part * chunk, min(inner, (part + 1) * chunk), DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside = k < inner
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * inner + k[None, :],
            mask=row_inside[:, None] & inside[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + column[:, None] * inner + k[None, :], mask=column_inside[:, None] & inside[None, :], other=0.0
        )
        total += tl.dot(x.to(a.dtype), tl.trans(a), input_precision="ieee")
    if EARLY:  # the input was there before the base's product began; only what is written may wait for that to end
        tl.extra.cuda.gdc_wait()
    if SCALED:
        total *= tl.load(scales_ptr + row, mask=row_inside, other=0.0)[:, None]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    if PARTS == 1:
        tl.store(out_ptr + at, total, mask=inside_out)
    else:
        stride = rows * width
        tl.store(parts_ptr + part * stride + at, total, mask=inside_out)
        count = counts_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.debug_barrier()  # all of the part is written before it counts
        if tl.atomic_add(count, 1, sem="acq_rel") == PARTS - 1:
            total = tl.load(parts_ptr + at, mask=inside_out, other=0.0, cache_modifier=".cg")
            for one in range(1, PARTS):
                total += tl.load(parts_ptr + one * stride + at, mask=inside_out, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + at, total, mask=inside_out)
            tl.store(count, 0)  # for the next launch


@triton.jit
def _expand_add(
    h_ptr,
    b_ptr,
    out_ptr,
    rows,
    width,
    out_width,
    scale,
    tiles_0,
    first_0,
    end_0,
    row_0,
    tiles_1,
    first_1,
    end_1,
    row_1,
    tiles_2,
    first_2,
    end_2,
    row_2,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile = tl.program_id(1)
    layer = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_1).to(tl.int32)
    before = tl.where(layer == 0, 0, tl.where(layer == 1, tiles_0, tiles_1))
    first = tl.where(layer == 0, first_0, tl.where(layer == 1, first_1, first_2))
    end = tl.where(layer == 0, end_0, tl.where(layer == 1, end_1, end_2))
    first_row = tl.where(layer == 0, row_0, tl.where(layer == 1, row_1, row_2))
    inner = (tile - before) * COLUMNS + tl.arange(0, COLUMNS)
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    row_inside, k_inside, column_inside = row < rows, k < RANK, first + inner < end
    inside = row_inside[:, None] & column_inside[None, :]
    to = out_ptr + row.to(tl.int64)[:, None] * out_width + first + inner[None, :]
    b = tl.load(
        b_ptr + (first_row + inner)[:, None] * RANK + k[None, :],
        mask=column_inside[:, None] & k_inside[None, :],
        other=0.0,
    )
    if EARLY:
        tl.extra.cuda.gdc_wait()
    total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(
        h_ptr + row.to(tl.int64)[:, None] * width + layer * RANK + k[None, :],
        mask=row_inside[:, None] & k_inside[None, :],
        other=0.0,
    )
    h = (h.to(tl.float32) * scale).to(b.dtype)
    total += tl.dot(h, tl.trans(b), input_precision="ieee")
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expand_gated(
    h_ptr,
    b_ptr,
    x_ptr,
    out_ptr,
    rows,
    width,
    size,
    at_gate,
    at_up,
    gate_row,
    up_row,
    scale,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    row_inside, column_inside, k_inside = row < rows, column < size, k < RANK
    inside_h, inside_b = row_inside[:, None] & k_inside[None, :], column_inside[:, None] & k_inside[None, :]
    at_h = h_ptr + row.to(tl.int64)[:, None] * width + k[None, :]
    at_b = b_ptr + column[:, None] * RANK + k[None, :]
    at = x_ptr + row.to(tl.int64)[:, None] * (2 * size) + column[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    b_gate = tl.load(at_b + gate_row * RANK, mask=inside_b, other=0.0)
    b_up = tl.load(at_b + up_row * RANK, mask=inside_b, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    gate, up = tl.load(at, mask=inside, other=0.0), tl.load(at + size, mask=inside, other=0.0)
    h_gate = (tl.load(at_h + at_gate, mask=inside_h, other=0.0).to(tl.float32) * scale).to(b_gate.dtype)
    h_up = (tl.load(at_h + at_up, mask=inside_h, other=0.0).to(tl.float32) * scale).to(b_up.dtype)
    gate_sum = (gate.to(tl.float32) + tl.dot(h_gate, tl.trans(b_gate), input_precision="ieee")).to(gate.dtype)
    up_sum = (up.to(tl.float32) + tl.dot(h_up, tl.trans(b_up), input_precision="ieee")).to(up.dtype)
    wide = gate_sum.to(tl.float32)
    made = narrowed(wide * tl.sigmoid(wide) * up_sum.to(tl.float32), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * size + column[None, :], made, mask=inside)


def shrink(x: Tensor | tuple[Tensor, Tensor], a_RK: Tensor, *, early: bool) -> Tensor:
    """x @ A.t(), [M, R]. Quantized rows come with their scales. All launches on a device share their counters, so they must
    follow each other. `early`: it follows a product of the same input on the same stream, and may begin before that ends."""
    x, scales = x if isinstance(x, tuple) else (x, None)
    x_MK, width = x.flatten(0, -2).contiguous(), len(a_RK)
    rows, inner = x_MK.shape
    if scales is None and rows >= _LARGE:
        return torch.mm(x_MK, a_RK.t())
    most_rows = TUNING.shrink_rows if rows < _LARGE else TUNING.rows
    tile_rows, tile_width = _tile(rows, most_rows), _tile(width, TUNING.shrink_width)
    wanted = min(TUNING.max_parts, triton.cdiv(inner, TUNING.sum_length)) if rows < _LARGE else 1
    chunk = triton.cdiv(triton.cdiv(inner, wanted), TUNING.depth) * TUNING.depth
    parts, grid = triton.cdiv(inner, chunk), (triton.cdiv(rows, tile_rows), triton.cdiv(width, tile_width))
    assert parts == 1 or grid[0] * grid[1] <= _MOST_TILES
    out_MR = torch.empty(rows, width, dtype=torch.float32, device=x_MK.device)
    _shrink[(*grid, parts)](
        x_MK,
        x_MK if scales is None else scales.flatten(),
        a_RK,
        out_MR if parts == 1 else torch.empty(parts, rows, width, dtype=torch.float32, device=x_MK.device),
        _counts(x_MK.device),
        out_MR,
        rows,
        width,
        inner,
        chunk,
        SCALED=scales is not None,
        PARTS=parts,
        ROWS=tile_rows,
        WIDTH=tile_width,
        DEPTH=TUNING.depth if x_MK.itemsize < 4 else 32,
        num_warps=4,
        num_stages=3,
        **_early(early and x_MK.data_ptr() == x.data_ptr()),  # not right behind a copy of the input
    )
    return out_MR


@cache
def _counts(device: torch.device) -> Tensor:
    """Parts of each tile that are written; zero between launches."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


@cache
def _can_begin_early() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def _early(wanted: bool) -> dict[str, bool]:
    """Arguments of a launch: whether it may begin before the one before it has ended."""
    if not (wanted and TUNING.early and _can_begin_early()):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


def _tile(size: int, most: int) -> int:
    return min(most, max(_LEAST, int(triton.next_power_of_2(size))))


def expand_add(out: Tensor, h_MR: Tensor, b_NR: Tensor, tiles: AdapterTiles, scale: float, *, early: bool) -> None:
    """Adds scale * h @ B.t() of each layer to its columns of the output, which is contiguous. `early`: `shrink` is the
    launch before it."""
    (rows, width), rank = h_MR.shape, b_NR.shape[1]
    tile_rows = _tile(rows, TUNING.rows)
    assert out.is_contiguous()
    _expand_add[(triton.cdiv(rows, tile_rows), tiles.num_tiles)](
        h_MR,
        b_NR,
        out,
        rows,
        width,
        out.shape[-1],
        scale,
        *tiles.layers,
        RANK=rank,
        DEPTH=max(_LEAST, triton.next_power_of_2(rank)),
        ROWS=tile_rows,
        COLUMNS=TUNING.columns,
        num_warps=TUNING.warps,
        num_stages=1,
        **_early(early),
    )


def expand_gated(gate_up: Tensor, h_MR: Tensor, b_NR: Tensor, gate_first: bool, scale: float, *, early: bool) -> Tensor:
    """silu(gate) * up, after the adapters' product was added to both. `gate_first`: whether A and B of gate come first."""
    (rows, width), rank, size = h_MR.shape, b_NR.shape[1], gate_up.shape[-1] // 2
    tile_rows = _tile(rows, TUNING.rows)
    assert gate_up.is_contiguous() and len(b_NR) == 2 * size
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    order = (0, rank, 0, size) if gate_first else (rank, 0, size, 0)
    _expand_gated[(triton.cdiv(rows, tile_rows), triton.cdiv(size, TUNING.gated_columns))](
        h_MR,
        b_NR,
        gate_up,
        out,
        rows,
        width,
        size,
        *order,
        scale,
        RANK=rank,
        DEPTH=max(_LEAST, triton.next_power_of_2(rank)),
        ROWS=tile_rows,
        COLUMNS=TUNING.gated_columns,
        num_warps=TUNING.gated_warps,
        num_stages=1,
        **_early(early),
    )
    return out


_HASHED = 1 << 14  # numbers of a tile
_HASH_STEP = 1 << 10
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def as_bfloat16(x):
    """fp32 numbers rounded to those of bf16, to nearest even as torch does; still fp32."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded).to(tl.float32, bitcast=True)


@triton.jit
def _hash_step(
    numbers,
    at,
    count,
    HELD: tl.constexpr,
    WIRE: tl.constexpr,
    APPLIED: tl.constexpr,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Bits of some numbers after the changes of type."""
    if WHOLE:  # without a mask, so that each thread reads 16 bytes at once
        x = tl.load(numbers + at)
    else:
        x = tl.load(numbers + at, mask=at < count, other=0.0)
    if tl.float32 == HELD and tl.bfloat16 == WIRE:
        x = as_bfloat16(x)
    return x.to(APPLIED).to(BITS, bitcast=True).to(tl.int64)


@triton.jit
def _hash(
    tiles_ptr,
    total_ptr,
    mix,
    HELD: tl.constexpr,
    WIRE: tl.constexpr,
    APPLIED: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tiles_ptr + tl.program_id(0) * 7
    numbers = tl.load(row).to(tl.pointer_type(HELD))
    count, start = tl.load(row + 1).to(tl.int32), tl.load(row + 2)
    width, first, columns, factor = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    numbers += start
    total, steps = tl.zeros((STEP,), dtype=tl.int64), tl.arange(0, STEP)
    if (width == columns) & (count == TILE) & (numbers.to(tl.int64) % 16 == 0):
        # Places follow each other, so one sum makes the next factor: products of 64 bits would take longer than all else.
        aligned = tl.multiple_of(numbers, 16)
        factors = steps.to(tl.int64) * (mix * 2) + ((first + start) * (mix * 2) + 1)
        for begin in range(0, TILE, STEP):
            total += _hash_step(aligned, begin + steps, count, HELD, WIRE, APPLIED, BITS, True) * factors
            factors += mix * 2 * STEP
    else:
        for begin in range(0, TILE, STEP):
            bits = _hash_step(numbers, begin + steps, count, HELD, WIRE, APPLIED, BITS, False)
            inside = (start + begin + steps).to(tl.int32)
            place = (inside // width.to(tl.int32)).to(tl.int64) * columns + inside % width.to(tl.int32)
            total += bits * (((first + place) * mix) * 2 + 1)
    tl.atomic_add(total_ptr, tl.sum(total, axis=0) * factor)


def hash_tiles(
    total: Tensor, tiles: Tensor, mix: int, held: torch.dtype, wire: torch.dtype, applied: torch.dtype
) -> None:
    """Adds the hash of numbers at their places to `total`. Rows of the table, [tiles, 7]: address of a matrix, number of
    numbers in the tile, the first one, columns of the matrix; place of the first number of the matrix in the whole one,
    columns of that; factor. Whole numbers are added up, so their order does not matter."""
    bits = tl.int32 if applied == torch.float32 else tl.int16
    if len(tiles):
        types = {"HELD": _TYPES[held], "WIRE": _TYPES[wire], "APPLIED": _TYPES[applied], "BITS": bits}
        _hash[(len(tiles),)](tiles, total, mix, **types, TILE=_HASHED, STEP=_HASH_STEP, num_warps=4)


def hash_table(parts: Sequence[tuple[Tensor, int, int, int]], device: torch.device) -> Tensor:
    """The table of `hash_tiles` for matrices, each with its place, the columns of the whole one, and its factor."""
    assert all(tensor.numel() < 1 << 31 for tensor, *_ in parts)
    rows = [
        (tensor.data_ptr(), min(_HASHED, tensor.numel() - start), start, tensor.shape[1], place, columns, factor)
        for tensor, place, columns, factor in parts
        for start in range(0, tensor.numel(), _HASHED)
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7).to(device)
