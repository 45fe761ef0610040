"""An engine that records its reports with their times, for tests that disturb its hosts in the meantime."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.processes import wait_until
from llamarl.engine.engine import Arrival, Death, EngineEvent, ExecutorLeft
from llamarl.engine.monarch.engine import MonarchEngine
from llamarl.messages import BatchResult, GroupResult, Up, WeightsLoaded


@dataclass
class Witness:
    patience_s: float
    seen: list[tuple[float, EngineEvent]] = field(default_factory=list)
    engine: MonarchEngine | None = None

    def engine_class(self) -> type[MonarchEngine]:
        witness = self

        class WitnessedEngine(MonarchEngine):
            def __init__(self, *args: Any) -> None:
                witness.engine = self
                super().__init__(*args)

            def events(self) -> Sequence[EngineEvent]:
                arrivals = super().events()
                witness.seen.extend((time.monotonic(), arrival) for arrival in arrivals)
                return arrivals

        return WitnessedEngine

    # Events since a moment

    def deaths(self, executor: str, since_s: float = 0.0) -> list[tuple[float, str]]:
        found = ((at_s, one) for at_s, one in list(self.seen) if at_s >= since_s)
        return [(at_s, one.reason) for at_s, one in found if isinstance(one, Death) and one.executor == executor]

    def _reports(self, kind: type[object], executor: str, since_s: float) -> int:
        return sum(
            at_s >= since_s and one.executor == executor and isinstance(one, Arrival) and isinstance(one.report, kind)
            for at_s, one in list(self.seen)
        )

    def updates(self, since_s: float = 0.0) -> int:
        return self._reports(BatchResult, "trainer/0", since_s)

    # Waiting for events

    def until(self, condition: Callable[[], object], what: str) -> None:
        if not wait_until(condition, self.patience_s):
            faulthandler.dump_traceback()
            raise AssertionError(f"not within {self.patience_s:g} s: {what}; {self._story()}")

    def _story(self) -> str:
        """When each executor came up and died, and what the hosts did last, as text."""
        now_s = time.monotonic()
        told = ((at_s, one) for at_s, one in list(self.seen) if isinstance(one, Death) or _is_up(one))
        words = (
            f"{one.executor} {one.reason if isinstance(one, Death) else 'up'} {now_s - at_s:.1f} s ago"
            for at_s, one in told
        )
        hosts = self.engine._log_folder / "hosts.log" if self.engine else None
        lines = hosts.read_text().splitlines()[-20:] if hosts and hosts.exists() else []
        return "\n".join(["; ".join(words), *lines])

    def until_updates(self, count: int) -> None:
        """Wait for `count` more updates."""
        now_s = time.monotonic()
        self.until(lambda: self.updates(now_s) >= count, f"{count} more updates")

    def until_works(self, executor: str, since_s: float) -> None:
        """Wait until the executor is up and, if it is a generator, has loaded weights."""
        kind = WeightsLoaded if executor.startswith("generator") else Up
        self.until(lambda: self._reports(kind, executor, since_s), f"{executor} at work")

    def until_groups(self, executor: str, count: int) -> None:
        """Wait until the executor has answered so many groups."""
        self.until(lambda: self._reports(GroupResult, executor, 0.0) >= count, f"{count} groups of {executor}")

    def until_dead(self, executor: str, since_s: float) -> tuple[float, str]:
        """Wait until the executor is dead; returns the seconds since `since_s`, and the reason."""
        self.until(lambda: self.deaths(executor, since_s), f"{executor} taken for dead")
        at_s, reason = self.deaths(executor, since_s)[0]
        return at_s - since_s, reason

    def until_left(self, executor: str, since_s: float) -> tuple[float, str]:
        """Wait until the executor that had joined has left; returns the seconds since `since_s`, and the reason."""

        def found() -> list[tuple[float, str]]:
            left = ((at_s, one) for at_s, one in list(self.seen) if isinstance(one, ExecutorLeft) and at_s >= since_s)
            return [(at_s - since_s, one.reason) for at_s, one in left if one.executor == executor]

        self.until(found, f"{executor} has left")
        return found()[0]

    def host_of(self, executor: str) -> str:
        assert self.engine is not None
        return self.engine._ranks[executor, 0].host.name


def _is_up(one: EngineEvent) -> bool:
    return isinstance(one, Arrival) and isinstance(one.report, Up)
