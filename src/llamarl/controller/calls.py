"""Calls: agents of a group ask the policy while the group is under way. Which replica answers, and what if it dies.

A call goes to the replica with the fewest unfinished calls among those that hold at least the version at which its group was
admitted, and never beyond a replica's capacity; otherwise it waits, in order. So every token of a group is at least as new as
the group's admission, which is what the bound on staleness needs. The calls of an evaluation go to the replica that keeps its
weights for that round.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from llamarl.controller.groups import GroupSpec
from llamarl.controller.pool import ExecutorPool, ExecutorState

Pinned = Callable[[int], ExecutorState | None]
"""The one replica that may answer the calls of a group; None: any may."""


@dataclass(eq=False)
class PendingCall:
    """A call that is not answered yet."""

    spec: GroupSpec
    caller: str  # executor that made it
    ordinal: int  # of its group
    replica: ExecutorState | None = None  # None: it waits
    attempts: int = 0  # number of replicas that died with it


class Calls:
    """All unanswered calls of a job, and the version that each group may be answered from."""

    def __init__(self, pool: ExecutorPool) -> None:
        self.pool = pool
        self._pending: dict[int, PendingCall] = {}
        self._waiting: list[int] = []  # in order
        self._of_group: dict[int, set[int]] = {}
        self._admitted: dict[int, int] = {}  # group -> the newest visible version at its admission
        self._last = -1  # number of the last call that was made; they ascend

    def __contains__(self, call: int) -> bool:
        return call in self._pending

    def admit(self, ordinal: int, version: int) -> int:
        """A group is given to its agents. Returns the oldest version that may answer them: a group that is handed out again
        keeps the version of its admission."""
        self._of_group.setdefault(ordinal, set())
        return self._admitted.setdefault(ordinal, version)

    def make(self, call: int, caller: str, ordinal: int, num_completions: int) -> None:
        if call <= self._last:
            return  # a duplicate
        self._last = call
        self._pending[call] = PendingCall(GroupSpec(call, "call", num_completions), caller, ordinal)
        self._of_group[ordinal].add(call)
        insort(self._waiting, call)

    def end(self, call: int) -> PendingCall:
        """The call is answered, refused or not wanted any more. A replica that still has it loses it."""
        pending = self._pending.pop(call)
        self._of_group[pending.ordinal].discard(call)
        if pending.replica is None:
            self._waiting.remove(call)
        elif call in pending.replica.groups:
            pending.replica.release(pending.spec)
        return pending

    def of_group(self, ordinal: int) -> tuple[int, ...]:
        """Unanswered calls of a group, in order."""
        return tuple(sorted(self._of_group.get(ordinal, ())))

    def leave(self, ordinal: int) -> None:
        """The group has passed its agents or is dropped. Its calls have ended before."""
        self._of_group.pop(ordinal, None)
        self._admitted.pop(ordinal, None)

    def give_back(self, call: int, *, died: bool) -> int:
        """The replica that had the call is gone: the call waits again. Returns how many replicas died with it."""
        pending = self._pending[call]
        pending.replica = None
        pending.attempts += died
        insort(self._waiting, call)
        return pending.attempts

    def assign(self, pinned: Pinned) -> Iterator[tuple[ExecutorState, GroupSpec]]:
        """Hand out all that can be handed out, oldest first. A call that must wait holds up only those that wait for the
        same."""
        if not self._waiting or all(self._is_full(one) for one in self.pool.executors):
            return
        blocked: set[tuple[str, int]] = set()
        for call in list(self._waiting):
            pending = self._pending[call]
            only = pinned(pending.ordinal)
            # The replica of a round has weights, even while the controller wants it to load others.
            version = -1 if only else self._admitted[pending.ordinal]
            key = (only.name if only else "", version)
            if key in blocked:
                continue
            among = [only] if only else self.pool.executors
            pending.replica = self._choose(pending.spec.num_completions, version, among)
            if pending.replica is None:
                blocked.add(key)
            else:
                self._waiting.remove(call)
                yield pending.replica, pending.spec

    def _is_full(self, replica: ExecutorState) -> bool:
        return not replica.up or replica.occupied >= self.pool.role.capacity

    def _choose(self, num_completions: int, version: int, among: Iterable[ExecutorState]) -> ExecutorState | None:
        """The least busy replica that is new enough and has room."""
        capacity = self.pool.role.capacity
        able = [
            one for one in among if one.up and one.version >= version and one.occupied + num_completions <= capacity
        ]
        return min(able, key=lambda one: (len(one.groups), one.index), default=None)
