"""Into how many parts attention cuts a sequence, so that no part of a GPU waits for others. A power of two, as measured by
benchmarks/attention_variants.py."""

from __future__ import annotations

from collections.abc import Collection

PART_TOKENS = 512  # at least, of each part, where only long sequences are cut
_UNEVEN = 2  # times the mean: the longest
_MAX_PARTS_OF_LONG = 8
_BUSY_PROGRAMS = 1024  # enough to keep a large GPU's memory busy
_MAX_PARTS_OF_ALL = 16


def parts_of_long(lengths: Collection[int]) -> int:
    """Of sequences that are far longer than most, which would be read alone in the end; 0: none is."""
    longest = max(lengths)
    if longest * len(lengths) <= _UNEVEN * sum(lengths):
        return 0
    fitting = -(-longest // PART_TOKENS)
    return min(_MAX_PARTS_OF_LONG, 1 << fitting.bit_length() - 1) if fitting > 1 else 0


def parts_of_all(programs: int) -> int:
    """Of every sequence, where so many programs, one for each sequence and key-value head, are too few."""
    return min(_MAX_PARTS_OF_ALL, 1 << (max(1, _BUSY_PROGRAMS // programs) - 1).bit_length())


def enough_programs(programs: int) -> bool:
    """Whether it is left to long sequences to be cut."""
    return parts_of_all(programs) <= 2
