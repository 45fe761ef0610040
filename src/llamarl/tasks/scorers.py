"""Scorers that are safe in this process: score(completion, answer, prompt) -> reward.

They turn text into a number in linear time. They never execute any part of a completion, and no pattern here can
backtrack. Scorers that can hang, or are the user's own, run in workers: see judge.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from llamarl.config import RewardConfig
from llamarl.tasks.choices import choice
from llamarl.tasks.extract import after_hashes, boxed, final_answer, gold_answer
from llamarl.tasks.numbers import read_number, tidy

Scorer = Callable[[str, str, str], float]

_NUMBER = re.compile(r"[-+]?(\d{1,40})(\.\d{1,40})?")
_TAIL_CHARS = 4000


def exact(completion: str, answer: str, prompt: str) -> float:
    """Return 1 if the completion equals the answer, ignoring white space around it."""
    return float(completion.strip() == answer)


def numeric(completion: str, answer: str, prompt: str) -> float:
    """Return 1 if the completion is a plain decimal number equal to the answer: 082, 82 and 82.0 are equal."""
    given, wanted = _number(completion), _number(answer)
    return float(given is not None and given == wanted)


def _number(text: str) -> Decimal | None:
    stripped = tidy(text.strip())
    if not _NUMBER.fullmatch(stripped) or not stripped.isascii():
        return None
    try:
        return Decimal(stripped)
    except InvalidOperation:
        return None


def same_number(given: str, answer: str) -> bool:
    """Whether two numbers are equal in any notation of numbers.py: 1,000 and $1000.00. 50% equals 50, not 0.5."""
    one, other = read_number(given), read_number(answer)
    return one is not None and other is not None and one.value == other.value


def has_boxed(text: str) -> bool:
    return text[-_TAIL_CHARS:].count("\\boxed") == 1 and bool(boxed(text))


def has_hashes(text: str) -> bool:
    """Whether exactly one line begins with ####, and it is the last."""
    return text.count("####") == 1 and text.rstrip().rpartition("\n")[2].startswith("####") and bool(after_hashes(text))


def has_thought(text: str) -> bool:
    """Whether the text is <think> some thought </think> and then an answer, with each tag once."""
    if text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    before, _, rest = text.partition("<think>")
    thought, _, said = rest.partition("</think>")
    return not before.strip() and bool(thought.strip()) and bool(said.strip())


FORMATS: dict[str, Callable[[str], bool]] = {"boxed": has_boxed, "hashes": has_hashes, "think": has_thought}


def make_safe_scorer(name: str, settings: RewardConfig) -> Scorer | None:
    """Return the scorer if it may run in this process, else None."""
    return _MAKERS[name](settings) if name in _MAKERS else None


def _make_numeric(settings: RewardConfig) -> Scorer:
    def score(completion: str, answer: str, prompt: str) -> float:
        given = final_answer(completion, settings.answer_from)
        return float(given is not None and same_number(given, gold_answer(answer)))

    return numeric if settings.answer_from == "whole" else score


def _make_format(settings: RewardConfig) -> Scorer:
    shape = FORMATS[settings.format]
    return lambda completion, answer, prompt: float(shape(completion))


def _make_length(settings: RewardConfig) -> Scorer:
    """The reward is 1 for up to half of `max_chars`, then falls to 0."""
    half = settings.max_chars / 2
    return lambda completion, answer, prompt: min(1.0, max(0.0, 2.0 - len(completion) / half))


_MAKERS: dict[str, Callable[[RewardConfig], Scorer]] = {
    "none": lambda settings: lambda completion, answer, prompt: 0.0,
    "exact": lambda settings: exact,
    "numeric": _make_numeric,
    "choice": lambda settings: choice,
    "format": _make_format,
    "length": _make_length,
}
