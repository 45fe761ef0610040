"""Calls of agents on their way: who asked, and under which number. Prompts are in the group store, as those of groups."""

from __future__ import annotations

from typing import NamedTuple

from llamarl import messages as msg
from llamarl.controller.events import FIRST_CALL
from llamarl.types import Problem, PromptGroup

_CALLS_PER_RUN = 1 << 40  # far more than a run can make; random draws follow from the number of a call
_NO_PROBLEM = Problem("", "")


class Asked(NamedTuple):
    """Where the answer to a call goes."""

    executor: str
    incarnation: int
    number: int


class CallTable:
    """Numbers the calls of a job. `run` is the number of this start of the job: its calls draw other random numbers."""

    def __init__(self, run: int = 0) -> None:
        self._next = FIRST_CALL + run * _CALLS_PER_RUN
        self._asked: dict[int, Asked] = {}
        self._calls: dict[Asked, int] = {}

    def add(self, asked: Asked, made: msg.CallRequested) -> PromptGroup:
        """A new call, as the group that a generator answers."""
        call, self._next = self._next, self._next + 1
        self._asked[call], self._calls[asked] = asked, call
        return PromptGroup(call, _NO_PROBLEM, made.prompt_tokens, made.sampling, "call", made.stop, made.stop_token_ids)

    def call_of(self, asked: Asked) -> int | None:
        """The call that an executor made; None if it has ended."""
        return self._calls.get(asked)

    def asked(self, call: int) -> Asked | None:
        return self._asked.get(call)

    def forget(self, call: int) -> None:
        if (asked := self._asked.pop(call, None)) is not None:
            del self._calls[asked]
