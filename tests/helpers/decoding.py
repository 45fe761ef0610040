"""Prompts of many lengths, and a decoder that runs until it is idle."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from helpers.groups import prompt_group
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.types import CompletionGroup, PromptGroup, bytes_to_floats

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


def short_and_long_groups(seed: int, count: int, *, max_prompt: int, max_new: int) -> list[PromptGroup]:
    """Short prompts and the longest ones, greedy and sampled."""
    random = Random(seed)
    return [
        prompt_group(
            [random.randrange(1, 23) for _ in range(random.choice([1, 3, 12, max_prompt - 1, max_prompt]))],
            ordinal=ordinal,
            samples=random.randint(1, 5),
            max_new_tokens=random.randint(1, max_new),
            temperature=random.choice([0.0, 1.0]),
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


def assert_same(found: dict[int, CompletionGroup], expected: dict[int, CompletionGroup]) -> None:
    """The same completions, with log-probs that are equal up to rounding."""
    assert found.keys() == expected.keys()
    for ordinal, group in expected.items():
        for mine, theirs in zip(found[ordinal].completions, group.completions, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.given == theirs.given
            assert bytes_to_floats(mine.behavior_logprobs) == pytest.approx(
                bytes_to_floats(theirs.behavior_logprobs), abs=1e-5
            )
