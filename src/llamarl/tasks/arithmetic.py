"""Addition of two numbers: every pair of operands once, some of them held out."""

from __future__ import annotations

from collections.abc import Iterator

from llamarl.config import Source
from llamarl.tasks.datasets import Example
from llamarl.tasks.task import is_held_out

TEMPLATE = "{prompt}"
SCORER = "exact"


def addition(a: int, b: int) -> Example:
    return Example(f"{a}+{b}=", str(a + b), str(a + b))


def additions(settings: Source) -> Iterator[tuple[Example, bool]]:
    """Each with whether it is held out. a+b and b+a go together, so that neither gives the other away."""
    numbers = range(settings.max_operand + 1)
    for a in numbers:
        for b in numbers:
            yield addition(a, b), is_held_out(f"{min(a, b)}+{max(a, b)}", settings.held_out)
