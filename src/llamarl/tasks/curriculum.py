"""A curriculum by success rate: which problem each ordinal gets, from how earlier answers were scored.

Ordinals form stages. The problems of stage k follow from the seed and from the outcomes of stages up to k - 2 alone. A
stage is as long as groups can lie apart that are under way together, so all those outcomes are known, and on disk, before
the first group of stage k is admitted: timing decides nothing, and after a kill the same ordinal gets the same problem.

The rule: problems come in passes, the first in a shuffled order. A problem is due again one pass after it was asked. If its
answers were all right (mean reward at least `solved_from`), it is put off by 1, 3, 7, 15 and then 31 further passes, the more
the oftener in a row; if all were wrong (at most `hard_up_to`), by 1, 2 and then 3. A stage takes the problems that are due
first, each once as long as there are others, in a shuffled order.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from llamarl.config import ScheduleConfig, TaskConfig
from llamarl.errors import ConfigError
from llamarl.tasks.mixture import PartOrder

MAX_PROBLEMS = 10_000_000
_MOST_SOLVED, _MOST_HARD = 5, 3  # results in a row beyond which a problem is put off no further


class CurriculumRule(Struct, frozen=True):
    """Everything that choices depend on besides outcomes. `sizes` and `weights` are those of the parts of a mixture."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    stage: int  # number of ordinals in a stage
    solved_from: float
    hard_up_to: float


def curriculum_rule(task: TaskConfig, schedule: ScheduleConfig, seed: int, problems: object) -> CurriculumRule:
    """The rule of a job. `problems` is its task, which must have its problems by number."""
    sizes, weights = getattr(problems, "sizes", ()), getattr(problems, "weights", ())
    if not sizes:
        raise ConfigError(
            "task.curriculum: cannot take effect on a task given from Python, unless it is a llamarl.Task"
        )
    if sum(sizes) > MAX_PROBLEMS:
        raise ConfigError(
            f"task.curriculum: {sum(sizes):,} problems are too many to keep count of; at most {MAX_PROBLEMS:,}"
        )
    stage = ordinals_under_way(schedule)
    return CurriculumRule(tuple(sizes), tuple(weights), seed, stage, task.solved_from, task.hard_up_to)


def ordinals_under_way(schedule: ScheduleConfig) -> int:
    """The most that two ordinals lie apart whose groups are under way together."""
    places = (schedule.max_staleness + 1) * (schedule.groups_per_update + schedule.dynamic_sampling)
    return places + schedule.window


class Choice(Struct, frozen=True, array_like=True):
    """The problem of an ordinal: its part of the mixture, and its number there."""

    part: int
    number: int


class Standing(Struct, frozen=True):
    """What is known of the problems when a stage begins, as shares of all of them."""

    solved: float
    hard: float
    unseen: float


class Curriculum:
    """Chooses problems. `hear` must be told the outcome of every group; the first that is told counts."""

    def __init__(self, rule: CurriculumRule) -> None:
        self.rule = rule
        self._order = PartOrder(rule.weights, seed=rule.seed)
        self._parts = [_Part(size, rule, index) for index, size in enumerate(rule.sizes)]
        self._chosen = (array("q"), array("q"))  # part and number by ordinal, of all stages so far
        self._outcomes: dict[int, float | None] = {}  # of stages that are not counted yet
        self._counted = 0  # ordinals whose outcomes are counted
        self._standings: list[Standing] = []
        self.missing: list[int] = []  # ordinals whose outcomes were not there in time, and count as none

    def choice(self, ordinal: int) -> Choice:
        """The problem of this ordinal."""
        while ordinal >= len(self._chosen[0]):
            self._begin_stage()
        return Choice(self._chosen[0][ordinal], self._chosen[1][ordinal])

    def hear(self, ordinal: int, reward: float | None) -> bool:
        """The mean reward of a group; None: it was dropped. False: its outcome was known before, and that one counts."""
        if ordinal < self._counted or ordinal in self._outcomes:
            return False
        self._outcomes[ordinal] = reward
        return True

    def standing(self, ordinal: int) -> Standing:
        """What was known when the stage of this ordinal began."""
        self.choice(ordinal)
        return self._standings[ordinal // self.rule.stage]

    def _begin_stage(self) -> None:
        first, stage = len(self._chosen[0]), self.rule.stage
        for ordinal in range(self._counted, first - stage):
            self._count(ordinal)
        self._counted = max(self._counted, first - stage)
        self._standings.append(self._describe())
        parts = [self._order.locate(ordinal)[0] for ordinal in range(first, first + stage)]
        number = first // stage
        dealt = {part: iter(self._parts[part].take(count, number)) for part, count in sorted(Counter(parts).items())}
        self._chosen[0].extend(parts)
        self._chosen[1].extend(next(dealt[part]) for part in parts)

    def _count(self, ordinal: int) -> None:
        if ordinal not in self._outcomes:
            self.missing.append(ordinal)
        reward = self._outcomes.pop(ordinal, None)
        if reward is not None:
            self._parts[self._chosen[0][ordinal]].count(self._chosen[1][ordinal], reward)

    def _describe(self) -> Standing:
        total = sum(self.rule.sizes)
        solved, hard, unseen = (
            sum(getattr(part, name) for part in self._parts) / total
            for name in ("num_solved", "num_hard", "num_unseen")
        )
        return Standing(solved, hard, unseen)


class _Part:
    """The problems of one part, by when they are due. Times are in problems asked: a pass is `size` long."""

    def __init__(self, size: int, rule: CurriculumRule, index: int) -> None:
        self._size, self._rule, self._index = size, rule, index
        self._fresh = np.random.default_rng([rule.seed, index]).permutation(size)
        self.num_unseen = size
        self._due: dict[int, int] = {}  # of problems that were asked
        self._heap: list[tuple[int, int]] = []  # (due, number); those whose due has changed are passed over
        self._streak: dict[int, int] = {}  # above 0: solved so often in a row; below: failed
        self.num_solved = self.num_hard = 0

    def take(self, count: int, stage: int) -> list[int]:
        """The problems that are due first, each once before any comes again, shuffled."""
        found: list[int] = []
        while len(found) < count:
            found += self._take_once(count - len(found))
        random = np.random.default_rng([self._rule.seed, self._index, stage])
        return [found[index] for index in random.permutation(len(found))]

    def _take_once(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < min(count, self._size):
            at = self._size - self.num_unseen  # the next unseen problem is due at this time
            self._drop_outdated()
            if self.num_unseen and (not self._heap or at <= self._heap[0][0]):
                number = int(self._fresh[at])
                self.num_unseen -= 1
                self._due[number] = at
            else:
                number = heapq.heappop(self._heap)[1]
            found.append(number)
        for number in found:
            self._put_off(number, 1)
        return found

    def count(self, number: int, reward: float) -> None:
        before = self._streak.get(number, 0)
        solved, hard = reward >= self._rule.solved_from, reward <= self._rule.hard_up_to
        now = max(0, before) + 1 if solved else min(0, before) - 1 if hard else 0
        self._streak[number] = now
        self.num_solved += (now > 0) - (before > 0)
        self.num_hard += (now < 0) - (before < 0)
        if now:
            self._put_off(number, 2 ** min(now, _MOST_SOLVED) - 1 if now > 0 else min(-now, _MOST_HARD))

    def _put_off(self, number: int, passes: int) -> None:
        self._due[number] += passes * self._size
        heapq.heappush(self._heap, (self._due[number], number))

    def _drop_outdated(self) -> None:
        while self._heap and self._due[self._heap[0][1]] != self._heap[0][0]:
            heapq.heappop(self._heap)


class Outcome(Struct, frozen=True, array_like=True):
    """A line of the record: what an ordinal was asked, and the mean reward; None: dropped, or lost with a kill."""

    ordinal: int
    part: int
    number: int
    reward: float | None


class CurriculumAudit(Struct, frozen=True):
    """Whether the recorded choices follow from the recorded outcomes by the rule."""

    num_outcomes: int
    differences: tuple[int, ...]  # ordinals that were asked another problem than the rule says
    told_twice: tuple[int, ...]


def audit_curriculum(rule: CurriculumRule, outcomes: Sequence[Outcome]) -> CurriculumAudit:
    curriculum, told = Curriculum(rule), Counter(outcome.ordinal for outcome in outcomes)
    for outcome in outcomes:
        curriculum.hear(outcome.ordinal, outcome.reward)
    ordered = sorted(outcomes, key=lambda outcome: outcome.ordinal)
    wrong = [one.ordinal for one in ordered if curriculum.choice(one.ordinal) != Choice(one.part, one.number)]
    return CurriculumAudit(len(outcomes), tuple(wrong), tuple(o for o, count in sorted(told.items()) if count > 1))


def standing_metrics(standing: Standing) -> Mapping[str, float]:
    return {f"curriculum_{name}": value for name, value in msgspec.structs.asdict(standing).items()}
