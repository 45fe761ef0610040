"""Bytes between parameters and a slot, in blocks that fit a core's cache: each is copied and summed by one thread.

numpy rather than torch: its copies and sums let other threads run and start none of their own, so the threads of one
publication meet once, at its end. Where executors share the cores, every meeting is a wait for the scheduler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Part = tuple[int, Bytes]  # where it lies in the whole, and its bytes

_PIECE = 1 << 15  # bytes with a sum of their own
_BLOCK = 1 << 20
_BLOCKS_PER_THREAD = 8  # less is not worth the start of a thread


def copy_in(whole: Bytes, parts: Iterable[Part], threads: int) -> bytes:
    """Put the parts in their places; returns the checksum of the whole."""
    blocks = _cut(parts)

    def fill(block: int) -> None:
        for at, part in blocks.get(block, ()):
            np.copyto(whole[at : at + len(part)], part)

    return _checksum(whole, fill, threads)


def copy_out(whole: Bytes, parts: Iterable[Part], threads: int) -> None:
    """Fill the parts from their places."""
    blocks = _cut(parts)

    def read(block: int) -> None:
        for at, part in blocks.get(block, ()):
            np.copyto(part, whole[at : at + len(part)])

    _for_each_block(len(whole), read, threads)


def checksum_of(whole: Bytes, threads: int) -> bytes:
    return _checksum(whole, lambda block: None, threads)


def _checksum(whole: Bytes, prepare: Callable[[int], None], threads: int) -> bytes:
    """32 bytes that any flipped bit changes, at the speed of memory: 64-bit sums of 32 KiB pieces, then a hash of them.
    It is there for torn, mixed and damaged weights; words swapped inside one piece would pass.

    Each block is summed right after `prepare` has written it, while it is still in the cache."""
    words, per_piece, per_block = whole.view(np.int64), _PIECE // 8, _BLOCK // _PIECE
    sums = np.zeros(len(words) // per_piece, dtype=np.int64)
    pieces = words[: len(sums) * per_piece].reshape(-1, per_piece)

    def take(block: int) -> None:
        prepare(block)
        of_block = slice(block * per_block, (block + 1) * per_block)
        np.add.reduce(pieces[of_block], axis=1, out=sums[of_block])

    _for_each_block(len(whole), take, threads)
    digest = hashlib.blake2b(sums.tobytes(), digest_size=32)
    digest.update(words[len(sums) * per_piece :].tobytes())
    return digest.digest()


def _cut(parts: Iterable[Part]) -> dict[int, list[Part]]:
    """The parts by the blocks they lie in."""
    blocks: dict[int, list[Part]] = {}
    for at, part in parts:
        end = at + len(part)
        for block in range(at // _BLOCK, -(-end // _BLOCK)):
            first, last = max(at, block * _BLOCK), min(end, (block + 1) * _BLOCK)
            blocks.setdefault(block, []).append((first, part[first - at : last - at]))
    return blocks


def _for_each_block(num_bytes: int, action: Callable[[int], None], threads: int) -> None:
    num_blocks = -(-num_bytes // _BLOCK)
    threads = max(1, min(threads, num_blocks // _BLOCKS_PER_THREAD))
    queue = count()  # whoever is free takes the next block

    def work() -> None:
        while (block := next(queue)) < num_blocks:
            action(block)

    if threads == 1:
        work()
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        helpers = [pool.submit(work) for _ in range(threads - 1)]
        work()
        for helper in helpers:
            helper.result()
