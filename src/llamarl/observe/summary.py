"""What a run amounted to: counted while it goes on, written once at its end."""

from __future__ import annotations

from collections.abc import Mapping

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
    tokens_generated: int
    tokens_trained: int
    restarts: int
    score_failures: int = 0  # attempts at judging an answer that failed, or took too long: not wrong answers
    score_timeouts: int = 0
    tool_failures: int = 0  # calls of a conversation's tool that crashed, or took too long
    tool_timeouts: int = 0
    policy: str  # the folder of the trained model, inside the run folder


class Made(Struct, frozen=True):
    """What one update adds to the totals."""

    groups: int = 0
    tokens: int = 0
    stale_tokens: float = 0.0  # tokens times their mean staleness
    reward: float | None = None
    skipped: int = 0


class Tally:
    """Running totals of the updates made so far. An update that is made again after a rewind replaces its first making."""

    def __init__(self) -> None:
        self.groups_trained = 0
        self.groups_dropped = 0
        self.tokens_generated = 0
        self.tokens_trained = 0
        self.staleness_max = 0
        self.restarts = 0
        self.skipped = 0
        self.score_failures = 0
        self.score_timeouts = 0
        self.tool_failures = 0
        self.tool_timeouts = 0
        self.evaluations: dict[int, float] = {}  # held-out accuracy by version
        self._stale_tokens = 0.0
        self._made: dict[int, Made] = {}

    @property
    def updates(self) -> int:
        return len(self._made)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of every update that had any, in order."""
        found = (self._made[update].reward for update in sorted(self._made))
        return [reward for reward in found if reward is not None]

    @property
    def staleness_mean(self) -> float:
        return self._stale_tokens / self.tokens_trained if self.tokens_trained else 0.0

    def add_update(self, update: int, metrics: Mapping[str, float]) -> None:
        tokens = int(metrics.get("trained_tokens", 0))
        made = Made(
            groups=int(metrics.get("groups", 0)),
            tokens=tokens,
            stale_tokens=metrics.get("staleness_mean", 0.0) * tokens,
            reward=metrics.get("reward"),
            skipped=int(metrics.get("skipped", 0)),
        )
        before = self._made.get(update, Made())
        self._made[update] = made
        self.groups_trained += made.groups - before.groups
        self.tokens_trained += made.tokens - before.tokens
        self.skipped += made.skipped - before.skipped
        self._stale_tokens += made.stale_tokens - before.stale_tokens
        self.staleness_max = max(self.staleness_max, int(metrics.get("staleness_max", 0)))
