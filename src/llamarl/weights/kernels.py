"""Copies and sums on the device, many tensors in one launch: a table of tiles lists sources and targets.

The sum of a block is that of its 32-bit words, each times its own odd number (2i + 1 for word i), in 64 bits. A changed word
changes it, and so do two different words that change places: in both cases the difference is smaller than 2**64 and not 0.
Sums are whole numbers, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 16 << 20  # that a sum is for
BLOCK_WORDS = BLOCK_BYTES // 4
TILE_WORDS = 1 << 14
_STEP_WORDS = 1 << 10
_WARPS = 4


class CopyRun(NamedTuple):
    """Words that are contiguous at both ends. `position` is their offset in the slot, in words."""

    source: int
    target: int
    position: int
    num_words: int


def tiles(runs: Iterable[CopyRun], source_word_bytes: int = 4) -> Tensor:
    """Table of tiles, [N, 4]: source, target, position in the slot and number of words. No tile crosses a block."""
    parts = [_tiles_of(run, source_word_bytes) for run in runs if run.num_words]
    table = np.concatenate(parts) if parts else np.zeros((0, 4), dtype=np.int64)
    return torch.from_numpy(table)


def _tiles_of(run: CopyRun, source_word_bytes: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    first, end = run.position, run.position + run.num_words
    edges = np.arange(first // TILE_WORDS * TILE_WORDS, end + TILE_WORDS, TILE_WORDS, dtype=np.int64).clip(first, end)
    starts, sizes = edges[:-1], np.diff(edges)
    inside = starts - first
    table = np.stack([run.source + inside * source_word_bytes, run.target + inside * 4, starts, sizes], axis=1)
    return table[sizes > 0]


@triton.jit
def _to_bfloat16(bits):
    """The upper half of fp32 bits, rounded to nearest even as torch does on a CPU, also for NaN."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def _load(pointer, at, end, WHOLE: tl.constexpr):
    if WHOLE:  # without a mask, so that each thread reads 16 bytes at once
        found = tl.load(pointer + at)
    else:
        found = tl.load(pointer + at, mask=at < end, other=0)
    return found


@triton.jit
def _do_tile(
    from_ptr,
    to_ptr,
    inside,
    num_words,
    TILE_WORDS: tl.constexpr,
    STEP_WORDS: tl.constexpr,
    COPY: tl.constexpr,
    SUM: tl.constexpr,
    NARROW: tl.constexpr,
    WHOLE: tl.constexpr,
):
    total = tl.zeros((STEP_WORDS,), dtype=tl.uint64)
    for start in range(0, TILE_WORDS, STEP_WORDS):
        at = start + tl.arange(0, STEP_WORDS)
        if NARROW:  # two fp32 numbers become the two halves of a word, as bf16
            wide = _load(from_ptr, start * 2 + tl.arange(0, 2 * STEP_WORDS), num_words * 2, WHOLE)
            halves = _to_bfloat16(wide.to(tl.uint32, bitcast=True))
            low, high = tl.split(tl.reshape(halves, (STEP_WORDS, 2)))
            words = (low | (high << 16)).to(tl.int32, bitcast=True)
        else:
            words = _load(from_ptr, at, num_words, WHOLE)
        if COPY and WHOLE:
            tl.store(to_ptr + at, words)
        elif COPY:
            tl.store(to_ptr + at, words, mask=at < num_words)
        if SUM:
            factors = ((inside + at) * 2 + 1).to(tl.uint64)
            total += words.to(tl.uint32, bitcast=True).to(tl.uint64) * factors
    return tl.sum(total, axis=0).to(tl.int64, bitcast=True)


@triton.jit
def _tile_kernel(
    tiles_ptr,
    sums_ptr,
    BLOCK_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STEP_WORDS: tl.constexpr,
    COPY: tl.constexpr,
    SUM: tl.constexpr,
    NARROW: tl.constexpr,
):
    row = tiles_ptr + tl.program_id(0) * 4
    from_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int32)), 16)
    to_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int32)), 16)
    position, num_words = tl.load(row + 2), tl.load(row + 3).to(tl.int32)
    inside = (position % BLOCK_WORDS).to(tl.int32)
    if num_words == TILE_WORDS:
        total = _do_tile(from_ptr, to_ptr, inside, num_words, TILE_WORDS, STEP_WORDS, COPY, SUM, NARROW, True)
    else:
        total = _do_tile(from_ptr, to_ptr, inside, num_words, TILE_WORDS, STEP_WORDS, COPY, SUM, NARROW, False)
    if SUM:
        tl.atomic_add(sums_ptr + position // BLOCK_WORDS, total)


@triton.jit
def _quantize_row(rows_ptr, columns, largest_fp8, inverse_fp8, least_scale, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = rows_ptr + tl.program_id(0).to(tl.int64) * 3
    dtype: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
    weight_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(dtype)), 16)
    target_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.uint8)), 16)
    at = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(weight), axis=0)
    scale = tl.where(largest > 0, tl.maximum(largest * inverse_fp8, least_scale), 1.0)
    scaled = weight * tl.div_rn(1.0, scale)
    scaled = tl.minimum(tl.maximum(scaled, -largest_fp8), largest_fp8)
    tl.store(target_ptr + at, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=at < columns)
    tl.store(tl.load(row + 2).to(tl.pointer_type(tl.float32)), scale)


class RowTable(NamedTuple):
    """Rows of equal length and type, from many matrices: the addresses of weight, fp8 and scale of each row."""

    addresses: Tensor  # [N, 3]
    columns: int
    wide: bool  # fp32, not bf16


def fits_rows(weight: Tensor) -> bool:
    """Whether `quantize_rows` can process a matrix: whole rows, aligned to 16 bytes at both ends."""
    known = weight.dtype in (torch.float32, torch.bfloat16)
    return known and weight.is_contiguous() and weight.shape[1] % 16 == 0 and weight.data_ptr() % 16 == 0


def row_addresses(weight: Tensor, target: Tensor, scales: Tensor) -> Tensor:
    rows = torch.arange(weight.shape[0])
    ends = ((tensor.data_ptr(), tensor.stride(0) * tensor.itemsize) for tensor in (weight, target, scales))
    return torch.stack([start + rows * step for start, step in ends], dim=1)


def quantize_rows(table: RowTable, largest_fp8: float, least_scale: float) -> None:
    """Writes fp8 and one scale per row, in one pass over memory; bit for bit what `wire.py` computes with torch."""
    block = triton.next_power_of_2(table.columns)
    if len(table.addresses):
        _quantize_row[(len(table.addresses),)](
            table.addresses,
            table.columns,
            largest_fp8,
            1 / largest_fp8,
            least_scale,
            WIDE=table.wide,
            BLOCK=block,
            num_warps=8 if block > 4096 else 4,
        )


def launch(table: Tensor, sums: Tensor, *, copy: bool, add: bool, narrow: bool = False) -> None:
    """Runs a table of tiles on the current stream of its device. With `add`, adds the sums of blocks to `sums`."""
    if len(table):
        _tile_kernel[(len(table),)](
            table,
            sums,
            BLOCK_WORDS=BLOCK_WORDS,
            TILE_WORDS=TILE_WORDS,
            STEP_WORDS=_STEP_WORDS,
            COPY=copy,
            SUM=add,
            NARROW=narrow,
            num_warps=_WARPS,
        )


def sums_of(data: Tensor) -> Tensor:
    """Sum of every block of some bytes on a device; whole words only."""
    sums = torch.zeros(-(-len(data) // BLOCK_BYTES), dtype=torch.int64, device=data.device)
    table = tiles([CopyRun(data.data_ptr(), 0, 0, len(data) // 4)]).to(data.device)
    launch(table, sums, copy=False, add=True)
    return sums
