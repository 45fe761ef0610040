"""An engine that notes what it reports and when, for a test that does things to its hosts meanwhile."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.processes import wait_until
from llamarl.engine.engine import Arrival, Death
from llamarl.engine.monarch.engine import MonarchEngine
from llamarl.messages import BatchResult, Up, WeightsLoaded


@dataclass
class Witness:
    patience_s: float
    seen: list[tuple[float, Arrival | Death]] = field(default_factory=list)
    engine: MonarchEngine | None = None

    def engine_class(self) -> type[MonarchEngine]:
        witness = self

        class WitnessedEngine(MonarchEngine):
            def __init__(self, *args: Any) -> None:
                witness.engine = self
                super().__init__(*args)

            def events(self) -> Sequence[Arrival | Death]:
                arrivals = super().events()
                witness.seen.extend((time.monotonic(), arrival) for arrival in arrivals)
                return arrivals

        return WitnessedEngine

    # What has happened since a moment

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

    # Waiting for it

    def until(self, condition: Callable[[], object], what: str) -> None:
        if not wait_until(condition, self.patience_s):
            faulthandler.dump_traceback()
            raise AssertionError(f"not within {self.patience_s:g} s: {what}; {self._story()}")

    def _story(self) -> str:
        """Who was up and who died, and when."""
        now_s = time.monotonic()
        told = ((at_s, one) for at_s, one in list(self.seen) if isinstance(one, Death) or isinstance(one.report, Up))
        words = (
            f"{one.executor}.{one.incarnation} {one.reason if isinstance(one, Death) else 'up'} {now_s - at_s:.1f} s ago"
            for at_s, one in told
        )
        return "; ".join(words)

    def until_updates(self, count: int) -> None:
        """So many more than now."""
        now_s = time.monotonic()
        self.until(lambda: self.updates(now_s) >= count, f"{count} more updates")

    def until_works(self, executor: str, since_s: float) -> None:
        """It is up, and a generator has loaded weights."""
        kind = WeightsLoaded if executor.startswith("generator") else Up
        self.until(lambda: self._reports(kind, executor, since_s), f"{executor} at work")

    def until_dead(self, executor: str, since_s: float) -> tuple[float, str]:
        """How long after `since_s`, and why."""
        self.until(lambda: self.deaths(executor, since_s), f"{executor} taken for dead")
        at_s, reason = self.deaths(executor, since_s)[0]
        return at_s - since_s, reason

    def host_of(self, executor: str) -> str:
        assert self.engine is not None
        return self.engine._ranks[executor, 0].host.name
