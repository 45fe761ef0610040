"""The executors of one role, as the controller sees them, and the choice of the least busy one."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from llamarl.controller.groups import GroupSpec
from llamarl.controller.line import Role, executor_names

_VERSIONS = 2  # number of versions that are asked for at about the same time


@dataclass(eq=False)
class ExecutorState:
    name: str
    role: Role
    index: int
    position: int  # place of its role among the roles of the same unit
    reads_weights: bool
    joined: bool = False  # it came while the job ran, and may leave; False: one of the line's own
    away: bool = False  # it had joined, and has left
    incarnation: int = 0
    failures: int = 0  # number of deaths in a row, without any work done in between
    up: bool = False
    version: int = -1  # version of the weights it holds; -1: none
    loading: int | None = None
    failed_loads: int = 0  # number of failed loads in a row, of versions that it still should hold
    groups: dict[int, GroupSpec] = field(default_factory=dict)  # by ordinal
    occupied: int = 0  # number of completions over all its groups

    def assign(self, group: GroupSpec) -> None:
        self.groups[group.ordinal] = group
        self.occupied += group.num_completions

    def release(self, group: GroupSpec) -> None:
        self.failures = 0
        del self.groups[group.ordinal]
        self.occupied -= group.num_completions

    def reset(self) -> list[GroupSpec]:
        """Forget everything that a dead process held. Returns its groups, in order."""
        held = [self.groups[ordinal] for ordinal in sorted(self.groups)]
        self.groups.clear()
        self.occupied, self.up, self.version, self.loading, self.failed_loads = 0, False, -1, None, 0
        return held


class ExecutorPool:
    """Finds the executor with the fewest groups among those that can take one; cheap with thousands of executors.

    A group that would only wait at an executor is given to it if no other one has fewer groups, not even one that cannot take
    any just now. Otherwise the first executor with new weights would get every group that the others are about to ask for.

    There is a heap of (groups, index) for each size of group and each version that is asked for, since an executor that is
    too full for one group may have room for a smaller one; and a heap of all executors that are up. Entries may be out of
    date: one counts only if it is still true."""

    def __init__(self, role: Role, position: int, reads_weights: bool) -> None:
        self.role, self._reads_weights = role, reads_weights
        self.executors = [
            ExecutorState(name, role, index, position, reads_weights) for index, name in enumerate(executor_names(role))
        ]
        self._at_once = role.at_once or role.capacity
        self._heaps: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._up: list[tuple[int, int]] = []

    def add(self, name: str, position: int) -> ExecutorState:
        """An executor that joins, beyond those of the line."""
        executor = ExecutorState(name, self.role, len(self.executors), position, self._reads_weights, joined=True)
        self.executors.append(executor)
        return executor

    def touch(self, executor: ExecutorState) -> None:
        """Call whenever the executor may have become available, or its groups have changed."""
        if not executor.up:
            return
        entry, room = (len(executor.groups), executor.index), self.role.capacity - executor.occupied
        self._put(self._up, entry)
        for (num_completions, _), heap in self._heaps.items():
            if num_completions <= room:
                self._put(heap, entry)

    def _put(self, heap: list[tuple[int, int]], entry: tuple[int, int]) -> None:
        if len(heap) > 64 + 4 * len(self.executors):
            heap[:] = self._entries()
        heapq.heappush(heap, entry)

    def least_busy(self, num_completions: int, version: int) -> ExecutorState | None:
        """The executor that gets the next group of `num_completions` completions; None: all are full, down or at another
        version."""
        heap = self._heap_of(num_completions, version)
        while heap:
            num_groups, index = heap[0]
            executor = self.executors[index]
            fits = executor.occupied + num_completions <= self.role.capacity
            if fits and num_groups == len(executor.groups) and self._available(executor, version):
                waits = executor.occupied + num_completions > self._at_once
                return None if waits and self._fewest_groups() < num_groups else executor
            heapq.heappop(heap)  # `touch` brings it back when the executor changes
        return None

    def _fewest_groups(self) -> int:
        """The smallest number of groups among the executors that are up."""
        while True:
            num_groups, index = self._up[0]
            if self.executors[index].up and num_groups == len(self.executors[index].groups):
                return num_groups
            heapq.heappop(self._up)

    def _heap_of(self, num_completions: int, version: int) -> list[tuple[int, int]]:
        key = (num_completions, version if self._reads_weights else 0)
        if key not in self._heaps:
            # Old versions are asked for again only after a death; then their heap is made anew.
            self._heaps = {known: heap for known, heap in self._heaps.items() if known[1] >= key[1] - _VERSIONS}
            self._heaps[key] = self._entries()
        return self._heaps[key]

    def _entries(self) -> list[tuple[int, int]]:
        return sorted((len(executor.groups), executor.index) for executor in self.executors if executor.up)

    @staticmethod
    def _available(executor: ExecutorState, version: int) -> bool:
        return executor.up and (not executor.reads_weights or (executor.version == version and version >= 0))
