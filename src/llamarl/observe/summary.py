"""The totals of a run: counted while it runs, written once at its end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

import msgspec
from msgspec import UNSET, Struct, UnsetType

from llamarl.machine import GIB, MemoryPeak

STOPPED, INTERRUPTED = "stopped on request", "interrupted"  # outcomes
MEMORY = "_memory_gib"  # end of a name in `timings.jsonl`, behind that of a role


class MemoryUsed(Struct, frozen=True):
    """The most memory of one rank of each role, and of one GPU with all that compute on it, in GiB."""

    roles: dict[str, float]  # of a GPU, by PyTorch; without a GPU, resident in host memory with what it shares
    gpu: float = 0.0  # whenever a rank looked; 0 without a GPU
    gpu_total: float = 0.0

    @staticmethod
    def of(peaks: Mapping[str, MemoryPeak]) -> MemoryUsed:
        """From the largest peaks of a rank of each role."""
        fullest = max(peaks.values(), key=lambda peak: peak.gpu_share, default=MemoryPeak())
        roles = {role: (peak.device or peak.host) / GIB for role, peak in sorted(peaks.items())}
        return MemoryUsed(roles, fullest.gpu_used / GIB, fullest.gpu_total / GIB)

    def flat(self) -> dict[str, float]:
        """For a row of `timings.jsonl`, where every value is a number."""
        roles = {**self.roles, **({"gpu": self.gpu} if self.gpu else {})}
        return {f"{role}{MEMORY}": gib for role, gib in roles.items()}

    def described(self) -> str:
        """`generator 37.2 GiB, trainer 61.0 GiB; the fullest GPU 104.3 of 139.8 GiB`."""
        roles = ", ".join(f"{role} {gib:.1f} GiB" for role, gib in self.roles.items())
        return roles + (f"; the fullest GPU {self.gpu:.1f} of {self.gpu_total:.1f} GiB" if self.gpu else "")


class Summary(Struct, kw_only=True):
    """The result of a job, as written to summary.json. Times and idle shares are of the last start only."""

    outcome: str  # "finished", or the reason why the job stopped
    eval_before: float | None
    eval_after: float | None
    score_name: str = "accuracy"  # name of the evaluated score: "accuracy" or "mean reward"
    updates: int
    groups_trained: int
    groups_without_variance: int = 0  # of these, groups whose rewards are all equal
    groups_dropped: int
    groups_replaced: int = 0  # groups without variance whose place in a batch another took (schedule.dynamic_sampling)
    skipped: int  # updates without effect, because the loss or gradient was not finite
    staleness_mean: float
    staleness_max: int
    reward_first: float
    reward_last: float
    sft_loss: float | UnsetType = UNSET  # cross-entropy of the last update; only where rows of data are imitated
    idle_share: dict[str, float]
    started_at: float = 0.0  # Unix time from which the other files of the run folder count seconds
    wall_s: float
    train_s: float  # wall time without startup and the evaluations before and after training
    updates_before: int = 0  # updates made by earlier starts of the job
    tokens_generated: int
    tokens_trained: int
    restarts: int
    score_failures: int = 0  # attempts to score an answer that crashed; wrong answers are not counted
    score_timeouts: int = 0  # attempts to score an answer that took too long
    tool_failures: int = 0  # calls of a conversation's tool that crashed
    tool_timeouts: int = 0  # calls of a conversation's tool that took too long
    agents: dict[str, int] | UnsetType = UNSET  # what agents did: failures, sessions, calls, branches; only with agents
    memory: MemoryUsed | UnsetType = UNSET
    policy: str  # folder of the trained model, relative to the run folder
    advice: list[str] = []  # obstacles to learning, each with the setting to change


class Counted(Struct, frozen=True):
    """The metrics of an update that go into the totals."""

    groups: float | None = None
    sft_rows: float | None = None
    zero_variance_share: float | None = None  # of the groups that are no rows of data
    trained_tokens: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    reward: float | None = None
    skipped: float | None = None


_WIDTH = 6  # numbers kept per update: groups, those without variance, tokens, tokens times staleness, skipped, reward


class Tally:
    """Running totals of the updates so far. An update that is repeated after a rewind replaces its first result.

    Keeps six numbers per update: 48 MB for a million updates."""

    def __init__(self) -> None:
        self.groups_dropped = 0
        self.groups_replaced = 0
        self.tokens_generated = 0
        self.staleness_max = 0
        self.restarts = 0
        self.score_failures = 0
        self.score_timeouts = 0
        self.tool_failures = 0
        self.tool_timeouts = 0
        self.agents: dict[str, int] = {}
        self.evaluations: dict[int, float] = {}  # held-out accuracy by version
        self.updates = 0
        self._made = array("d")  # NaN where an update or its reward is missing
        self._groups = self._flat = self._tokens = self._stale_tokens = self._skipped = 0.0

    @property
    def groups_trained(self) -> int:
        return int(self._groups)

    @property
    def groups_without_variance(self) -> int:
        return round(self._flat)

    @property
    def tokens_trained(self) -> int:
        return int(self._tokens)

    @property
    def skipped(self) -> int:
        return int(self._skipped)

    @property
    def rewards(self) -> list[float]:
        """Mean rewards of the updates that had one, in order."""
        return [reward for reward in self._made[_WIDTH - 1 :: _WIDTH] if not math.isnan(reward)]

    @property
    def staleness_mean(self) -> float:
        return self._stale_tokens / self._tokens if self._tokens else 0.0

    def add_update(self, update: int, metrics: Mapping[str, float]) -> None:
        self.add(update, msgspec.convert(metrics, Counted))

    def add(self, update: int, counted: Counted) -> None:
        groups, tokens = counted.groups or 0.0, counted.trained_tokens or 0.0
        row = (
            groups,
            (counted.zero_variance_share or 0.0) * (groups - (counted.sft_rows or 0.0)),
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
        self._flat += row[1] - before[1]
        self._tokens += row[2] - before[2]
        self._stale_tokens += row[3] - before[3]
        self._skipped += row[4] - before[4]
        self._made[at : at + _WIDTH] = array("d", row)
        if counted.staleness_max is not None and counted.staleness_max > self.staleness_max:
            self.staleness_max = int(counted.staleness_max)
