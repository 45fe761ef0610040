"""When held-out problems are answered, and by which replica.

Evaluation groups take the same line as the others, under negative ordinals, and stop before the roles that train. One
replica answers a whole round and keeps its weights meanwhile, so a round measures one version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from llamarl.config import EvaluateConfig
from llamarl.controller.groups import GroupSpec
from llamarl.controller.pool import ExecutorPool, ExecutorState
from llamarl.controller.version_policy import VersionPolicy


@dataclass(eq=False)
class EvaluationRound:
    version: int
    ordinals: tuple[int, ...]
    replica: ExecutorState | None = None
    unassigned: list[int] = field(init=False)
    ungenerated: set[int] = field(init=False)
    unsettled: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.unassigned = sorted(self.ordinals)
        self.ungenerated = set(self.ordinals)
        self.unsettled = set(self.ordinals)


class Evaluation:
    def __init__(self, settings: EvaluateConfig, updates: int) -> None:
        self.settings, self.updates = settings, updates
        self._rounds: list[EvaluationRound] = []
        self._next_ordinal = -1
        self._done_before: frozenset[int] = frozenset()
        self._last_began = not settings.prompts

    @property
    def all_done(self) -> bool:
        return self._last_began and not self._rounds

    def is_due(self, version: int) -> bool:
        if not self.settings.prompts:
            return False
        between = self.settings.every > 0 and version % self.settings.every == 0
        return version in (0, self.updates) or between

    def version_visible(self, version: int) -> None:
        """Call once for every version, in order."""
        if self.is_due(version):
            if version not in self._done_before:
                self._rounds.append(EvaluationRound(version, self._new_ordinals()))
            self._last_began = version == self.updates

    def resume(self, evaluated: Iterable[int]) -> None:
        self._done_before = frozenset(evaluated)

    def assign(
        self, pool: ExecutorPool, newest: int, policy: VersionPolicy, agents: ExecutorPool | None = None
    ) -> Iterator[tuple[ExecutorState, GroupSpec]]:
        """Hand unanswered problems of the oldest round to its replica, as far as there is room. With `agents`, these get the
        problems, and the replica their calls."""
        if not self._rounds:
            return
        current = self._rounds[0]
        pinned = policy.pin(current.version)
        if current.replica is None and current.unassigned:
            current.replica = pool.least_busy(1, newest if pinned is None else pinned)
            if current.replica is not None:
                current.version = current.replica.version
        replica = current.replica
        while replica is not None and current.unassigned:
            holder = agents.least_busy(1, newest) if agents else replica
            if holder is None or holder.occupied >= holder.role.capacity:
                return
            yield holder, GroupSpec(current.unassigned.pop(), "evaluation", 1, pinned)

    def replica_of(self, ordinal: int) -> ExecutorState | None:
        """The replica that answers all of the round that this problem belongs to; None for any other group."""
        return next((one.replica for one in self._rounds if ordinal in one.ungenerated), None)

    def pins(self, executor: ExecutorState) -> bool:
        """Whether the executor must keep its weights for a round."""
        return any(one.replica is executor and bool(one.ungenerated) for one in self._rounds)

    def passed(self, ordinal: int) -> ExecutorState | None:
        """The problem is answered. Returns the replica of its round if it need not keep its weights any more."""
        for one in self._rounds:
            if ordinal in one.ungenerated:
                one.ungenerated.remove(ordinal)
                return None if one.ungenerated else one.replica
        return None

    def settled(self, ordinal: int) -> EvaluationRound | None:
        """Returns the round that this group finishes, if it does."""
        for one in self._rounds:
            if ordinal in one.unsettled:
                one.unsettled.remove(ordinal)
                if not one.unsettled:
                    self._rounds.remove(one)
                    return one
        return None

    def lost(self, executor: ExecutorState) -> None:
        """The executor died. Its round begins anew, under other ordinals, so that one version answers all of it."""
        for index, one in enumerate(self._rounds):
            if one.replica is executor and one.ungenerated:
                self._rounds[index] = EvaluationRound(one.version, self._new_ordinals())

    @property
    def oldest_unassigned(self) -> int | None:
        """The oldest version with problems that no replica was given yet."""
        return min((one.version for one in self._rounds if one.unassigned), default=None)

    @property
    def oldest_ungenerated(self) -> int | None:
        """The oldest version with problems that are not answered yet."""
        return min((one.version for one in self._rounds if one.ungenerated), default=None)

    def owns(self, ordinal: int) -> bool:
        """False for a group that is left of a round which began anew."""
        return any(ordinal in one.unsettled for one in self._rounds)

    def _new_ordinals(self) -> tuple[int, ...]:
        first, count = self._next_ordinal, self.settings.prompts
        self._next_ordinal -= count
        return tuple(range(first, first - count, -1))
