"""What a run amounted to: counted while it goes on, written once at its end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

from msgspec import Struct


class Summary(Struct, kw_only=True):
    outcome: str  # "finished", or why it stopped
    eval_before: float | None
    eval_after: float | None
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
    tokens_generated: int
    tokens_trained: int
    restarts: int
    score_failures: int = 0  # attempts at judging an answer that failed, or took too long: not wrong answers
    score_timeouts: int = 0
    tool_failures: int = 0  # calls of a conversation's tool that crashed, or took too long
    tool_timeouts: int = 0
    policy: str  # the folder of the trained model, inside the run folder


_COLUMNS = ("groups", "trained_tokens", "stale_tokens", "reward", "skipped")


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
        self._made = {name: array("d") for name in _COLUMNS}  # not a number where an update, or its value, is missing
        self._totals = dict.fromkeys(_COLUMNS, 0.0)

    @property
    def groups_trained(self) -> int:
        return int(self._totals["groups"])

    @property
    def tokens_trained(self) -> int:
        return int(self._totals["trained_tokens"])

    @property
    def skipped(self) -> int:
        return int(self._totals["skipped"])

    @property
    def rewards(self) -> list[float]:
        """Mean reward of every update that had any, in order."""
        return [reward for reward in self._made["reward"] if not math.isnan(reward)]

    @property
    def staleness_mean(self) -> float:
        return self._totals["stale_tokens"] / self.tokens_trained if self.tokens_trained else 0.0

    def add_update(self, update: int, metrics: Mapping[str, float | None]) -> None:
        tokens = metrics.get("trained_tokens") or 0.0
        reward = metrics.get("reward")
        row = {
            "groups": metrics.get("groups") or 0.0,
            "trained_tokens": tokens,
            "stale_tokens": (metrics.get("staleness_mean") or 0.0) * tokens,
            "reward": math.nan if reward is None else reward,
            "skipped": metrics.get("skipped") or 0.0,
        }
        missing = update + 1 - len(self._made["groups"])
        self.updates += missing > 0 or math.isnan(self._made["groups"][update])
        for name, column in self._made.items():
            column.extend([math.nan] * missing)
            self._totals[name] += _or_zero(row[name]) - _or_zero(column[update])
            column[update] = row[name]
        self.staleness_max = max(self.staleness_max, int(metrics.get("staleness_max") or 0))


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
