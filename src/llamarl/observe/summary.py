"""What a run amounted to: counted while it goes on, written once at its end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

import msgspec
from msgspec import Struct


class Summary(Struct, kw_only=True):
    outcome: str  # "finished", or why it stopped
    eval_before: float | None
    eval_after: float | None
    score_name: str = "accuracy"  # what these two are; or "mean reward"
    updates: int
    groups_trained: int
    groups_dropped: int
    skipped: int  # updates that changed nothing, since a loss or gradient was no number
    staleness_mean: float
    staleness_max: int
    reward_first: float
    reward_last: float
    idle_share: dict[str, float]
    started_at: float = 0.0  # unix time; seconds in the other files of the run folder count from then
    wall_s: float
    train_s: float  # wall without start-up and the evaluations before and after
    updates_before: int = 0  # made by earlier starts of the job; times and waiting are of the last start alone
    tokens_generated: int
    tokens_trained: int
    restarts: int
    score_failures: int = 0  # attempts at judging an answer that failed, or took too long: not wrong answers
    score_timeouts: int = 0
    tool_failures: int = 0  # calls of a conversation's tool that crashed, or took too long
    tool_timeouts: int = 0
    policy: str  # the folder of the trained model, inside the run folder
    advice: list[str] = []  # what stood in the way of learning, and what to change


class Counted(Struct, frozen=True):
    """What is counted of an update's metrics."""

    groups: float | None = None
    trained_tokens: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    reward: float | None = None
    skipped: float | None = None


_WIDTH = 5  # numbers that are kept of an update: groups, tokens, tokens times their mean staleness, skipped, reward


class Tally:
    """Running totals of the updates made so far. An update that is made again after a rewind replaces its first making.

    Keeps five numbers an update: 40 MB for a million."""

    def __init__(self) -> None:
        self.groups_dropped = 0
        self.tokens_generated = 0
        self.staleness_max = 0
        self.restarts = 0
        self.score_failures = 0
        self.score_timeouts = 0
        self.tool_failures = 0
        self.tool_timeouts = 0
        self.evaluations: dict[int, float] = {}  # held-out accuracy by version
        self.updates = 0
        self._made = array("d")  # no numbers where an update, or its reward, is missing
        self._groups = self._tokens = self._stale_tokens = self._skipped = 0.0

    @property
    def groups_trained(self) -> int:
        return int(self._groups)

    @property
    def tokens_trained(self) -> int:
        return int(self._tokens)

    @property
    def skipped(self) -> int:
        return int(self._skipped)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of every update that had any, in order."""
        return [reward for reward in self._made[_WIDTH - 1 :: _WIDTH] if not math.isnan(reward)]

    @property
    def staleness_mean(self) -> float:
        return self._stale_tokens / self._tokens if self._tokens else 0.0

    def add_update(self, update: int, metrics: Mapping[str, float]) -> None:
        self.add(update, msgspec.convert(metrics, Counted))

    def add(self, update: int, counted: Counted) -> None:
        tokens = counted.trained_tokens or 0.0
        row = (
            counted.groups or 0.0,
            tokens,
            (counted.staleness_mean or 0.0) * tokens,
            counted.skipped or 0.0,
            math.nan if counted.reward is None else counted.reward,
        )
        at = update * _WIDTH
        if at > len(self._made):
            self._made.extend([math.nan] * (at - len(self._made)))
        before = self._made[at : at + _WIDTH]
        if not before or math.isnan(before[0]):
            before = array("d", [0.0] * _WIDTH)
            self.updates += 1
        self._groups += row[0] - before[0]
        self._tokens += row[1] - before[1]
        self._stale_tokens += row[2] - before[2]
        self._skipped += row[3] - before[3]
        self._made[at : at + _WIDTH] = array("d", row)
        if counted.staleness_max is not None and counted.staleness_max > self.staleness_max:
            self.staleness_max = int(counted.staleness_max)
