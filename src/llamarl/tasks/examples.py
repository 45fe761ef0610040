"""One row of data, as every kind of data is read into."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from llamarl.types import Turn


class Example(Struct, frozen=True):
    """One row of data: question, answer and worked solution."""

    question: str
    answer: str
    solution: str
    turns: tuple[Turn, ...] = ()
    columns: dict[str, Any] = {}  # further columns that the user's own scorers need
