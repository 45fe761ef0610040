"""Sizes that the generator pads its computations to, so that few shapes occur and each is captured and compiled once. Whoever
predicts how long it takes must know them too."""

from __future__ import annotations

_FEW_ROWS = 128  # so many take as long as one: the weights are read either way
_LEAST_TOKENS = 16


def padded_rows(count: int, most: int) -> int:
    """Sequences that are decoded together: the next power of two or, where rows cost, one and a half of one."""
    power = 1 << max(0, (count - 1).bit_length())
    between = 3 * power // 4
    return min(between if count <= between and power > _FEW_ROWS else power, most)


def padded_tokens(count: int) -> int:
    """Of prompts that are read together."""
    return max(_LEAST_TOKENS, 1 << max(0, (count - 1).bit_length()))
