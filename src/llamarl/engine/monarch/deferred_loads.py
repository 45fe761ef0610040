"""Orders to load a version that nobody can give yet, or any more, wait here instead of failing.

Slots in shared memory outlive the trainer that wrote them. Between hosts the trainer itself gives the weights: after its
death a version can be had again when the next trainer has published it.
"""

from __future__ import annotations

from collections.abc import Mapping

from llamarl.controller.line import role_of
from llamarl.messages import LoadWeights, Report, WeightsPublished


class DeferredLoads:
    def __init__(self, weights_source: Mapping[str, str]) -> None:
        self._source = weights_source
        self._newest: dict[str, int] = {}  # by publishing role
        self._held: dict[str, LoadWeights] = {}  # by executor

    def holds(self, executor: str, message: LoadWeights) -> bool:
        """True: it was kept, and comes back from `published`. One that is too old goes through, and is refused there."""
        if self._newest.get(self._source[role_of(executor)], -1) >= message.version:
            return False
        self._held[executor] = message
        return True

    def reported(self, executor: str, report: Report | None) -> dict[str, LoadWeights]:
        """What may be sent now."""
        if not isinstance(report, WeightsPublished):
            return {}
        role = role_of(executor)
        self._newest[role] = report.version
        due = {
            reader: message
            for reader, message in self._held.items()
            if self._source[role_of(reader)] == role and message.version <= report.version
        }
        for reader in due:
            del self._held[reader]
        return due

    def died(self, executor: str) -> None:
        self._held.pop(executor, None)
        self._newest.pop(role_of(executor), None)
