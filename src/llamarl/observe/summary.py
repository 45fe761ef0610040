"""What a run amounted to: counted while it goes on, written once at its end."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Summary(Struct, kw_only=True):
    outcome: str  # "finished", or why it stopped
    eval_before: float | None
    eval_after: float | None
    updates: int
    groups_trained: int
    groups_dropped: int
    staleness_mean: float
    staleness_max: int
    reward_first: float
    reward_last: float
    idle_share: dict[str, float]
    wall_s: float
    train_s: float  # wall without start-up and the evaluations before and after
    tokens_generated: int
    tokens_trained: int
    restarts: int
    policy: str  # the folder of the trained model, inside the run folder


class Tally:
    """Running totals of the updates made so far."""

    def __init__(self) -> None:
        self.updates = 0
        self.groups_trained = 0
        self.groups_dropped = 0
        self.tokens_generated = 0
        self.tokens_trained = 0
        self.staleness_max = 0
        self.restarts = 0
        self.rewards: list[float] = []
        self._stale_tokens = 0.0

    @property
    def staleness_mean(self) -> float:
        return self._stale_tokens / self.tokens_trained if self.tokens_trained else 0.0

    def add_update(self, metrics: Mapping[str, float]) -> None:
        tokens = int(metrics.get("trained_tokens", 0))
        self.updates += 1
        self.groups_trained += int(metrics.get("groups", 0))
        self.tokens_trained += tokens
        self._stale_tokens += metrics.get("staleness_mean", 0.0) * tokens
        self.staleness_max = max(self.staleness_max, int(metrics.get("staleness_max", 0)))
        if "reward" in metrics:
            self.rewards.append(metrics["reward"])
