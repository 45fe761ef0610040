"""The `inline` engine: all executors in this process, one after the other, always in the same order. For tests, debugging."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llamarl.engine.engine import Arrival, Death
from llamarl.engine.out_of_memory import explain_death
from llamarl.engine.runner import Runner
from llamarl.errors import JobFailed, LlamaRLError
from llamarl.executors.executor import Executor
from llamarl.messages import Message, Report, Up
from llamarl.plugins import describe_error


class InlineEngine:
    def __init__(self, build: Callable[[str, Path | None], Executor]) -> None:
        self._build = build
        self._runners: dict[str, tuple[int, Runner]] = {}
        self._inbox: deque[tuple[str, Message]] = deque()
        self._arrivals: list[Arrival | Death] = []

    def spawn(self, executor: str, incarnation: int, snapshot: Path | None) -> None:
        with _blaming(executor):
            self._runners[executor] = (incarnation, Runner(self._build(executor, snapshot)))
        self._report(executor, [Up()])

    def send(self, executor: str, message: Message) -> None:
        self._inbox.append((executor, message))

    def events(self) -> Sequence[Arrival | Death]:
        """Deliver every message, then let each executor with work do one slice of it."""
        while self._inbox:
            executor, message = self._inbox.popleft()
            with _blaming(executor):
                self._report(executor, self._runners[executor][1].handle(message))
        for executor, (_, runner) in self._runners.items():
            if not runner.idle:
                with _blaming(executor):
                    self._report(executor, runner.work())
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def dismiss(self, executor: str, reason: str) -> None:
        raise AssertionError(f"{executor} cannot have joined: {reason}")

    def stop(self) -> None:
        self._runners.clear()
        self._inbox.clear()

    def _report(self, executor: str, reports: Sequence[Report]) -> None:
        incarnation, runner = self._runners[executor]
        for report in reports:
            done = runner.envelope()
            self._arrivals.append(Arrival(executor, incarnation, report, done.spans, memory=done.memory))


@contextmanager
def _blaming(executor: str) -> Iterator[None]:
    """Name the executor in an exception that ends the job; the traceback stays attached for the debugger."""
    try:
        yield
    except LlamaRLError:
        raise
    except Exception as error:  # the border to the executor's code
        told = explain_death(executor, describe_error(error), killed_for_memory=False)
        raise JobFailed(f"{executor} failed: {told}") from error
