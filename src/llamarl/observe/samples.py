"""Rollouts as rows of a table for people: a few of many, decoded, without control characters, cut to a bounded length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from llamarl.observe.metric_logger import SampleRow
from llamarl.types import PromptGroup, Rollout, RolloutGroup, bytes_to_tokens

MAX_CHARS = 4000  # of a prompt or an answer
_MAX_TOKENS = 4 * MAX_CHARS  # decoded at most; tokens without text are rare
_KEPT = "\n\t"

Decode = Callable[[Sequence[int]], str]


class SampledRollout(Struct, frozen=True):
    """A rollout and its prompt. Text is made of it later, in a logger's thread."""

    prompt: PromptGroup
    rollout: Rollout


def choose(groups: Sequence[RolloutGroup], count: int) -> tuple[SampledRollout, ...]:
    """The first rollout of each of the first groups: for evaluations, always the same problems."""
    return tuple(SampledRollout(group.prompt, group.rollouts[0]) for group in groups[:count] if group.rollouts)


def sample_row(chosen: SampledRollout, decode: Decode) -> SampleRow:
    problem, completion = chosen.prompt.problem, chosen.rollout.completion
    tokens = bytes_to_tokens(completion.tokens)[:_MAX_TOKENS]
    asked = problem.turns[-1].content if problem.turns else problem.prompt
    return SampleRow(
        ordinal=chosen.prompt.ordinal,
        prompt=printable(asked),
        answer=printable(decode(tokens.tolist())),
        expected=printable(problem.answer),
        reward=float(chosen.rollout.reward),
        num_tokens=completion.num_tokens,
        truncated=completion.truncated,
    )


def printable(text: str, limit: int = MAX_CHARS) -> str:
    """The text with everything escaped that is no printable character, and cut after `limit` characters."""
    shown = "".join(char if char.isprintable() or char in _KEPT else ascii(char)[1:-1] for char in text[:limit])
    more = len(text) - limit
    return f"{shown} ... (and {more} characters more)" if more > 0 else shown
