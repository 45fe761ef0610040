"""Which version of the policy samples which group: the newest there is, or, deterministically, one that is laid down.

Deterministic: batch u is sampled wholly by version max(0, u - S). A replica changes weights only when it holds nothing and
nothing is left to hand out that its version must sample, so no answer is ever written by two versions. The tail of each
version is the price. A version stays in its slot while a death could make it necessary again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from llamarl.controller.evaluation import is_evaluation
from llamarl.controller.pool import ExecutorState
from llamarl.controller.probe import is_probe, probed_version

if TYPE_CHECKING:
    from llamarl.controller.controller import Controller


class Order(Protocol):
    def version_for(self, ordinal: int) -> int:
        """The version that is to sample a group."""

    def priority(self, ordinal: int) -> int:
        """Groups that wait are handed out lowest priority number first, then lowest ordinal."""

    def target(self, executor: ExecutorState) -> int:
        """The version that an executor should hold now."""

    def has_moved(self) -> bool:
        """True once, when what idle executors should hold has changed without an event of theirs."""

    def may_publish(self, version: int) -> bool:
        """Whether the version two before it, whose slot it takes, is no longer needed."""

    def may_commit(self, version: int) -> bool:
        """Whether all is in the store that a job resumed from this version could not make again."""

    @property
    def last_needed(self) -> int:
        """When the job is stopping: the ordinal at which admission ends."""


class NewestOrder:
    """The newest visible version samples everything, and is taken in flight."""

    last_needed = 0

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def version_for(self, ordinal: int) -> int:
        return self._controller.newest

    def priority(self, ordinal: int) -> int:
        return 0

    def target(self, executor: ExecutorState) -> int:
        return self._controller.newest

    def has_moved(self) -> bool:
        return False

    def may_publish(self, version: int) -> bool:
        return True

    def may_commit(self, version: int) -> bool:
        return True


class ExactOrder:
    def __init__(self, controller: Controller) -> None:
        self._controller, self._schedule = controller, controller.schedule
        self._last_target = -1

    def version_for(self, ordinal: int) -> int:
        if is_probe(ordinal):
            return probed_version(ordinal)
        if is_evaluation(ordinal):
            return self._controller.evaluation.version_of(ordinal)
        return self._schedule.sampling_version(ordinal)

    def priority(self, ordinal: int) -> int:
        """By version: replicas go on to a younger one only when the older has nothing left."""
        return self.version_for(ordinal)

    def target(self, executor: ExecutorState) -> int:
        return executor.version if executor.groups else self._idle_target()

    def has_moved(self) -> bool:
        before, self._last_target = self._last_target, self._idle_target()
        return before != self._last_target

    def _idle_target(self) -> int:
        """The oldest version with groups that nobody was given yet; else the newest, for what comes next."""
        controller = self._controller
        versions = [controller.newest, *(rank for rank, _ in controller.waiting[0][:1])]
        if (evaluated := controller.evaluation.oldest_unassigned) is not None:
            versions.append(evaluated)
        if controller.may_admit:
            versions.append(self.version_for(controller.next_ordinal))
        return min(versions)

    def may_publish(self, version: int) -> bool:
        controller = self._controller
        ungenerated = [ordinal for executor in controller.pools[0].executors for ordinal in executor.groups]
        ungenerated += (ordinal for _, ordinal in controller.waiting[0])
        if controller.next_ordinal < self._schedule.num_groups:
            ungenerated.append(controller.next_ordinal)
        needed = [self.version_for(ordinal) for ordinal in ungenerated if not is_evaluation(ordinal)]
        if (evaluated := controller.evaluation.oldest_ungenerated) is not None:
            needed.append(evaluated)
        return min(needed, default=version) > version - 2

    def may_commit(self, version: int) -> bool:
        """Batches up to version + S - 1 were sampled by versions that are gone after a crash."""
        known = min(version + self._schedule.max_staleness, self._schedule.updates)
        return self._controller.training.assembled >= known

    @property
    def last_needed(self) -> int:
        final = self._controller.training.final_version
        last_batch = min(final + self._schedule.max_staleness, self._schedule.updates)
        return last_batch * self._schedule.groups_per_update
