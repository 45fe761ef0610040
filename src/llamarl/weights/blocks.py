"""Bytes between parameters and a slot in host memory, in blocks that fit a core's cache: each is copied and digested by one
thread.

numpy rather than torch: its copies and sums let other threads run and start none of their own, so the threads of one
publication meet once, at its end. Where executors share the cores, every meeting is a wait for the scheduler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Part = tuple[int, Bytes]  # where it lies in the whole, and its bytes
Cut = Mapping[int, Sequence[Part]]  # the parts, or pieces of them, that lie in each block

BLOCK = 1 << 20
DIGEST = 16  # bytes per block
_PIECE_WORDS = 1024
_BLOCKS_PER_THREAD = 8  # less is not worth the start of a thread


def copy_in(whole: Bytes, cut: Cut, threads: int) -> bytes:
    """Put the parts in their places; returns the digest of every block of the whole."""

    def fill(block: int) -> None:
        for at, part in cut.get(block, ()):
            np.copyto(whole[at : at + len(part)], part)

    return _digests(whole, range(num_blocks(len(whole))), fill, threads)


def copy_out(whole: Bytes, cut: Cut, threads: int) -> None:
    """Fill the parts from their places."""

    def read(block: int) -> None:
        for at, part in cut[block]:
            np.copyto(part, whole[at : at + len(part)])

    for_each(list(cut), read, threads)


def copy_out_digested(whole: Bytes, cut: Cut, blocks: Sequence[int], threads: int) -> bytes:
    """Fill the parts, all of which lie in these blocks, and return the blocks' digests, in one pass over memory."""

    def read(block: int) -> None:
        for at, part in cut.get(block, ()):
            np.copyto(part, whole[at : at + len(part)])

    return _digests(whole, blocks, read, threads)


def digests_of(whole: Bytes, blocks: Sequence[int], threads: int) -> bytes:
    return _digests(whole, blocks, lambda block: None, threads)


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK)


def digest(block: Bytes) -> bytes:
    """16 bytes that any flipped bit changes, at the speed of memory: the 64-bit sums of 8 KiB pieces, hashed. It is there for
    torn, mixed, shifted and damaged weights; words that change places inside one piece would pass."""
    words = block[: len(block) // 8 * 8].view(np.int64)
    in_pieces = len(words) // _PIECE_WORDS * _PIECE_WORDS
    sums = np.add.reduce(words[:in_pieces].reshape(-1, _PIECE_WORDS), axis=1)
    rest = block[in_pieces * 8 :]
    return hashlib.blake2b(sums.tobytes() + rest.tobytes(), digest_size=DIGEST).digest()


def _digests(whole: Bytes, blocks: Sequence[int], prepare: Callable[[int], None], threads: int) -> bytes:
    """Each block is digested right after `prepare` has written it, while it is still in the cache."""
    found = bytearray(len(blocks) * DIGEST)

    def take(index: int) -> None:
        block = blocks[index]
        prepare(block)
        found[index * DIGEST : (index + 1) * DIGEST] = digest(whole[block * BLOCK : (block + 1) * BLOCK])

    for_each(range(len(blocks)), take, threads)
    return bytes(found)


def cut_by_block(parts: Iterable[Part]) -> Cut:
    blocks: dict[int, list[Part]] = {}
    for at, part in parts:
        end = at + len(part)
        for block in range(at // BLOCK, num_blocks(end)):
            first, last = max(at, block * BLOCK), min(end, (block + 1) * BLOCK)
            blocks.setdefault(block, []).append((first, part[first - at : last - at]))
    return blocks


def for_each(blocks: Sequence[int], action: Callable[[int], None], threads: int) -> None:
    """By so many threads, if there are enough of them."""
    threads = max(1, min(threads, len(blocks) // _BLOCKS_PER_THREAD))
    queue = count()  # whoever is free takes the next block

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
