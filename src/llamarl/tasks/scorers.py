"""Scorers: score(completion, answer, prompt) -> reward. Pure text in, a number out; nothing of it is ever executed."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

Scorer = Callable[[str, str, str], float]

_NUMBER = re.compile(r"[-+]?(\d{1,40})(\.\d{1,40})?")


def exact(completion: str, answer: str, prompt: str) -> float:
    """1 when the completion is the answer, white space around it aside."""
    return float(completion.strip() == answer)


def numeric(completion: str, answer: str, prompt: str) -> float:
    """1 when the completion is a plain decimal number equal to the answer: 082, 82 and 82.0 are the same."""
    given, wanted = _number(completion), _number(answer)
    return float(given is not None and given == wanted)


def _number(text: str) -> Decimal | None:
    stripped = text.strip()
    if not _NUMBER.fullmatch(stripped) or not stripped.isascii():
        return None
    try:
        return Decimal(stripped)
    except InvalidOperation:
        return None


SCORERS: dict[str, Scorer] = {"exact": exact, "numeric": numeric}
