"""Prompts of many lengths, and a decoder that runs until it is idle."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from helpers.groups import prompt_group
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.types import CompletionGroup, PromptGroup

MAX_STEPS = 3000


def random_groups(seed: int, count: int, *, max_prompt: int, max_new: int, max_samples: int) -> list[PromptGroup]:
    """Prompts up to the given length, with up to so many answers, which may all be long."""
    random = Random(seed)
    return [
        prompt_group(
            [random.randrange(1, 23) for _ in range(random.randint(1, max_prompt))],
            ordinal=ordinal,
            samples=random.randint(1, max_samples),
            max_new_tokens=random.randint(max_new // 2, max_new),
        )
        for ordinal in range(count)
    ]


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
