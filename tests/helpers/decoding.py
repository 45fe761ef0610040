"""Runs a decoder until it is idle."""

from __future__ import annotations

from collections.abc import Iterable

from llamarl.generate.decoder import ContinuousDecoder
from llamarl.types import CompletionGroup, PromptGroup

MAX_STEPS = 3000


def decode_all(decoder: ContinuousDecoder, groups: Iterable[PromptGroup]) -> dict[int, CompletionGroup]:
    """Maps each ordinal to its completions; each may finish only once."""
    for group in groups:
        decoder.add(group)
    found: dict[int, CompletionGroup] = {}
    for _ in range(MAX_STEPS):
        if decoder.idle:
            return found
        for done in decoder.step():
            assert done.ordinal not in found
            found[done.ordinal] = done
    raise AssertionError("the decoder does not come to an end")
