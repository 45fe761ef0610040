"""Sizes to which the generator pads its batches, so that each of a few shapes is captured and compiled once. The planner uses
them too."""

from __future__ import annotations

_FEW_ROWS = 128  # up to this many rows take as long as one, since reading the weights dominates
_LEAST_TOKENS = 16


def padded_rows(count: int, most: int) -> int:
    """Padded number of sequences in a decode step: the next power of two or, above 128, also 1.5 times one."""
    power = 1 << max(0, (count - 1).bit_length())
    between = 3 * power // 4
    return min(between if count <= between and power > _FEW_ROWS else power, most)


def padded_tokens(count: int) -> int:
    """Padded length of prompts that are read together: the next power of two."""
    return max(_LEAST_TOKENS, 1 << max(0, (count - 1).bit_length()))
