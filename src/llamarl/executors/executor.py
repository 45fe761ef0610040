"""The interface that an engine needs: an executor answers messages, and goes on with long work in slices between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from llamarl.messages import Message, Report


class Executor(Protocol):
    def handle(self, message: Message) -> Iterable[Report]:
        """Take one message; report the work that it finishes."""

    def work(self) -> Iterable[Report]:
        """Do one slice of unfinished work, short enough that a new message need not wait long."""

    @property
    def idle(self) -> bool:
        """True when only a message can bring new work."""


class UnexpectedMessage(Exception):
    """A message that this role cannot answer: the line is declared wrongly."""

    def __init__(self, role: str, message: Message) -> None:
        super().__init__(f"a {role} cannot handle {type(message).__name__}")
