"""Which version of the policy samples which group: the newest, or, in deterministic mode, one that is fixed beforehand.

Deterministic: batch u is sampled only by version max(0, u - S). A replica changes weights only when it is empty and no group
is left to hand out that its version must sample, so one version writes the whole of every answer. The price is the tail of
each version. A version stays in its slot as long as a death could make it necessary again.

A policy keeps no state and knows no controller: every answer follows from its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from llamarl.config import ScheduleConfig
from llamarl.controller.pool import ExecutorState


class VersionPolicy(Protocol):
    def pin(self, version: int) -> int | None:
        """The version that must sample a group for which `version` is due; None: whichever is the newest."""

    def idle_target(self, newest: int, unassigned: Iterable[int]) -> int:
        """The version that an idle executor should hold; `unassigned` are the versions due for groups that wait."""

    def target(self, executor: ExecutorState, idle_target: int) -> int:
        """The version that this executor should hold now."""

    def oldest_needed(self, ungenerated: Iterable[int]) -> int | None:
        """The oldest version that must stay in its slot, given the versions due for groups that are not generated yet;
        None: no version must."""

    def batches_needed(self, version: int) -> int:
        """Number of batches that must be in the store before a snapshot of `version` may be committed."""

    def last_ordinal(self, final_version: int) -> int:
        """The ordinal at which admission ends when the job stops early, after `final_version`."""


class NewestVersion:
    """The newest visible version samples every group. Executors load it with answers in flight."""

    def pin(self, version: int) -> int | None:
        return None

    def idle_target(self, newest: int, unassigned: Iterable[int]) -> int:
        return newest

    def target(self, executor: ExecutorState, idle_target: int) -> int:
        return idle_target

    def oldest_needed(self, ungenerated: Iterable[int]) -> int | None:
        return None

    def batches_needed(self, version: int) -> int:
        return version

    def last_ordinal(self, final_version: int) -> int:
        return 0


class ExactVersion:
    """Every group is sampled by the version that is due for it, and by no other."""

    def __init__(self, schedule: ScheduleConfig) -> None:
        self._schedule = schedule

    def pin(self, version: int) -> int | None:
        return version

    def idle_target(self, newest: int, unassigned: Iterable[int]) -> int:
        """Replicas go on to a younger version only when the older one has no groups left."""
        return min([newest, *unassigned])

    def target(self, executor: ExecutorState, idle_target: int) -> int:
        return executor.version if executor.groups else idle_target

    def oldest_needed(self, ungenerated: Iterable[int]) -> int | None:
        return min(ungenerated, default=None)

    def batches_needed(self, version: int) -> int:
        """The versions that sampled batches up to version + S - 1 are gone after a crash."""
        return min(version + self._schedule.max_staleness, self._schedule.updates)

    def last_ordinal(self, final_version: int) -> int:
        return self.batches_needed(final_version) * self._schedule.groups_per_update
