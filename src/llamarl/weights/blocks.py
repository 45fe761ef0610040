"""Copies bytes between parameters and a slot in host memory, in blocks that fit a core's cache: one thread copies and digests
each block.

numpy rather than torch: its copies and sums let other threads run and start none of their own, so the threads of one
publication wait for each other once, at its end. Where executors share the cores, every such wait is slow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
ByteRun = tuple[int, Bytes]  # its offset in the slot, and its bytes
RunsByBlock = Mapping[int, Sequence[ByteRun]]  # runs, cut where blocks end

BLOCK = 1 << 20
DIGEST = 16  # bytes per block
_SUM_WORDS = 1024
_BLOCKS_PER_THREAD = 8  # fewer are not worth starting a thread


def copy_in(whole: Bytes, runs: RunsByBlock, threads: int) -> bytes:
    """Copies the runs into a slot; returns the digest of every block of the slot."""

    def fill(block: int) -> None:
        for at, run in runs.get(block, ()):
            np.copyto(whole[at : at + len(run)], run)

    return _digests(whole, range(num_blocks(len(whole))), fill, threads)


def copy_out(whole: Bytes, runs: RunsByBlock, threads: int) -> None:
    """Fills the runs from a slot."""

    def read(block: int) -> None:
        for at, run in runs[block]:
            np.copyto(run, whole[at : at + len(run)])

    for_each(list(runs), read, threads)


def copy_out_digested(whole: Bytes, runs: RunsByBlock, blocks: Sequence[int], threads: int) -> bytes:
    """Fills the runs, all of which lie in these blocks, and returns the digests of the blocks, in one pass over memory."""

    def read(block: int) -> None:
        for at, run in runs.get(block, ()):
            np.copyto(run, whole[at : at + len(run)])

    return _digests(whole, blocks, read, threads)


def digests_of(whole: Bytes, blocks: Sequence[int], threads: int) -> bytes:
    return _digests(whole, blocks, lambda block: None, threads)


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK)


def digest(block: Bytes) -> bytes:
    """16 bytes that any flipped bit changes, at the speed of memory: a hash of the 64-bit sums of every 8 KiB. It detects
    torn, mixed, shifted and damaged weights, but not words that change places within the same 8 KiB."""
    words = block[: len(block) // 8 * 8].view(np.int64)
    summed = len(words) // _SUM_WORDS * _SUM_WORDS
    sums = np.add.reduce(words[:summed].reshape(-1, _SUM_WORDS), axis=1)
    rest = block[summed * 8 :]
    return hashlib.blake2b(sums.tobytes() + rest.tobytes(), digest_size=DIGEST).digest()


def _digests(whole: Bytes, blocks: Sequence[int], prepare: Callable[[int], None], threads: int) -> bytes:
    """Digests each block right after `prepare` has written it, while it is still in the cache."""
    found = bytearray(len(blocks) * DIGEST)

    def take(index: int) -> None:
        block = blocks[index]
        prepare(block)
        found[index * DIGEST : (index + 1) * DIGEST] = digest(whole[block * BLOCK : (block + 1) * BLOCK])

    for_each(range(len(blocks)), take, threads)
    return bytes(found)


def runs_by_block(runs: Iterable[ByteRun]) -> RunsByBlock:
    blocks: dict[int, list[ByteRun]] = {}
    for at, run in runs:
        end = at + len(run)
        for block in range(at // BLOCK, num_blocks(end)):
            first, last = max(at, block * BLOCK), min(end, (block + 1) * BLOCK)
            blocks.setdefault(block, []).append((first, run[first - at : last - at]))
    return blocks


def for_each(blocks: Sequence[int], action: Callable[[int], None], threads: int) -> None:
    """Calls `action` for every block, by up to so many threads."""
    threads = max(1, min(threads, len(blocks) // _BLOCKS_PER_THREAD))
    queue = count()  # a free thread takes the next block

    def work() -> None:
        while (index := next(queue)) < len(blocks):
            action(blocks[index])

    if threads == 1:
        work()
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        helpers = [pool.submit(work) for _ in range(threads - 1)]
        work()
        for helper in helpers:
            helper.result()
