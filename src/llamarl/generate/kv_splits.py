"""Number of parts that attention splits a sequence into, so that no part of a GPU waits for another. Always a power of two;
the constants were measured by benchmarks/attention_variants.py."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

PART_TOKENS = 512  # least length of a part where only long sequences are split
OWN_TOKENS = 256  # likewise where a sequence shares what it begins with
_UNEVEN = 2  # lengths are uneven if the longest is more than so many times the mean
_MAX_PARTS_OF_LONG = 8
_BUSY_PROGRAMS = 1024  # enough programs to keep a large GPU's memory busy
_MAX_PARTS_OF_ALL = 16
_SHARED_PROGRAMS = 256  # programs of four warps that keep a large GPU's memory busy
_SHARED_PARTS = 4  # of pages that several sequences share, at least
_MAX_SHARED_PARTS = 16
_LONG_SHARED_PART = 256  # tokens from which a part is read in large blocks
_PROMPT_PROGRAMS = 128  # of prompt tokens beside answers: one for each processor of a large GPU
_MAX_PROMPT_PARTS = 8


class SharedCut(NamedTuple):
    """How pages that several sequences share are split, each part read by one program, in blocks of so many tokens."""

    parts: int = _SHARED_PARTS
    block: int = 16


def shared_cut(programs: int, longest: int) -> SharedCut:
    """`programs` is the count without splits, one for each reading and key-value head; `longest` the most shared tokens."""
    parts = min(_MAX_SHARED_PARTS, max(_SHARED_PARTS, _parts_for(_SHARED_PROGRAMS, programs)))
    return SharedCut(parts, block=64) if longest >= parts * _LONG_SHARED_PART else SharedCut()


def parts_of_prompt(programs: int) -> int:
    """Parts of what prompt tokens attend to. `programs` is the count without splits, one for each tile of queries."""
    return min(_MAX_PROMPT_PARTS, _parts_for(_PROMPT_PROGRAMS, programs))


def _parts_for(busy: int, programs: int) -> int:
    """Least power of two of parts that makes `busy` programs of so many."""
    return 1 << (max(1, -(-busy // programs)) - 1).bit_length()


def parts_of_long(lengths: Collection[int]) -> int:
    """Parts of a sequence that is far longer than most, which would otherwise be read alone in the end; 0: none is."""
    longest = max(lengths)
    return 0 if longest * len(lengths) <= _UNEVEN * sum(lengths) else _parts_of(longest)


def parts_up_to(longest: int) -> tuple[int, ...]:
    """All numbers of parts that `parts_of_long` can give for sequences of up to this length, besides 0."""
    return tuple(1 << power for power in range(1, _parts_of(longest).bit_length()))


def _parts_of(longest: int) -> int:
    fitting = -(-longest // PART_TOKENS)
    return min(_MAX_PARTS_OF_LONG, 1 << fitting.bit_length() - 1) if fitting > 1 else 0


def parts_of_all(programs: int) -> int:
    """Parts of every sequence. `programs` is the count without splits: one for each sequence and key-value head."""
    return min(_MAX_PARTS_OF_ALL, 1 << (max(1, _BUSY_PROGRAMS // programs) - 1).bit_length())


def enough_programs(programs: int) -> bool:
    """Whether `programs` keep a GPU busy, so that only long sequences need be split."""
    return parts_of_all(programs) <= 2
