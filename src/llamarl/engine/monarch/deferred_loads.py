"""Defers orders to load a version that no living trainer has published; otherwise they would fail.

Slots in shared memory outlive the trainer that wrote them. Between hosts the trainer itself serves the weights: after its
death, a version is available again once the next trainer has published it.
"""

from __future__ import annotations

from collections.abc import Mapping

from llamarl.controller.line import role_of
from llamarl.messages import LoadWeights, Report, WeightsPublished


class DeferredLoads:
    """Load orders that wait for a publication."""

    def __init__(self, weights_source: Mapping[str, str]) -> None:
        self._source = weights_source
        self._newest: dict[str, int] = {}  # by publishing role
        self._deferred: dict[str, LoadWeights] = {}  # by executor

    def defer(self, executor: str, message: LoadWeights) -> bool:
        """Whether the order was kept; then `on_report` returns it later. One for too old a version is not kept: the trainer
        refuses it."""
        if self._newest.get(self._source[role_of(executor)], -1) >= message.version:
            return False
        self._deferred[executor] = message
        return True

    def on_report(self, executor: str, report: Report | None) -> dict[str, LoadWeights]:
        """The orders that may be sent now, by executor."""
        if not isinstance(report, WeightsPublished):
            return {}
        role = role_of(executor)
        self._newest[role] = report.version
        due = {
            reader: message
            for reader, message in self._deferred.items()
            if self._source[role_of(reader)] == role and message.version <= report.version
        }
        for reader in due:
            del self._deferred[reader]
        return due

    def on_death(self, executor: str) -> None:
        self._deferred.pop(executor, None)
        self._newest.pop(role_of(executor), None)
