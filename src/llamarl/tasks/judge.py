"""The judge: from a completion to a verdict, by one scorer or several, here or in a worker.

Safe scorers are asked on the spot. Symbolic ones, patterns and a user's own functions go to a pool of workers. A verdict is
a number or a failure; a failure is tried again and then reported as such, never as a wrong answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from llamarl.config import Config, LLMJudge, Reward, Sandbox
from llamarl.errors import ConfigError
from llamarl.plugins import is_reference
from llamarl.tasks.extract import final_answer, gold_answer
from llamarl.tasks.failures import Counts
from llamarl.tasks.mathematics import quick_verdict
from llamarl.tasks.scorers import Scorer, make_safe_scorer
from llamarl.tasks.workers.errands import Errands
from llamarl.tasks.workers.wire import KILL_SHARE, Ask, Item, Setup, Status, Verdict, pack_text
from llamarl.types import Problem

NAMES = ("exact", "numeric", "choice", "regex", "math", "format", "length", "code", "llm_judge", "none")
_IN_WORKERS = ("regex", "math", "code", "llm_judge")
_MAX_REMEMBERED = 10_000
FALLBACK = "exact"  # for a task that names none
_USUAL, _NOBODY = Sandbox(), LLMJudge()


class Outcome(Struct, frozen=True):
    """What became of one answer. `reward` counts only where the status is ok."""

    status: Status
    reward: float = 0.0
    reason: str = ""
    seconds: float = 0.0
    trace: str = ""  # of an exception in a user's own function


@dataclass
class _Case:
    """An answer that waits for a worker: what is known of its reward, and the weights of what is not."""

    key: Hashable
    known: float
    weights: tuple[float, ...]
    seconds: float  # spent on it here


class Judge:
    """`own` names the scorers that suit the task's problems, for reward.scorer=auto."""

    def __init__(
        self,
        settings: Reward,
        own: Sequence[str] = (FALLBACK,),
        *,
        sandbox: Sandbox = _USUAL,
        llm: LLMJudge = _NOBODY,
    ) -> None:
        self._settings, self._sandbox, self._llm = settings, sandbox, llm
        self.peak_mb = 0.0  # the most that judging one answer has taken in a worker
        self._safe: dict[str, Scorer] = {}
        self._pooled: tuple[str, ...] = ()
        self._errands: Errands[_Case] = Errands(self._setup, settings.workers, settings.retries)
        self._equal: dict[tuple[bytes, bytes], float] = {}  # what algebra has found out about (answer, completion)
        self._done: list[tuple[Hashable, Outcome]] = []
        alone = own if settings.scorer == "auto" else [settings.scorer]
        for name in settings.combine or dict.fromkeys(alone):
            self._load(name)
        if "regex" in self._pooled and not settings.pattern:
            raise ConfigError("reward.pattern: the regex scorer needs one")

    @classmethod
    def of(cls, config: Config, own: Sequence[str], *, workers: int = 0) -> Judge:
        """The job's; `workers` instead of as many as it says."""
        settings = replace(config.reward, workers=workers) if workers else config.reward
        return cls(settings, own, sandbox=config.sandbox, llm=config.llm_judge)

    @property
    def num_pending(self) -> int:
        return len(self._errands) + len(self._done)

    @property
    def num_waiting(self) -> int:
        """Answers that are with a worker, or wait for one."""
        return len(self._errands)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._errands.worker_pids

    @property
    def counts(self) -> Counts:
        """Attempts at judging that failed, since somebody last took them."""
        return self._errands.counts

    def take_counts(self) -> Counts:
        counts, self._errands.counts = self._errands.counts, Counts()
        return counts

    def prepare(self) -> None:
        """Start the workers, if any are needed, so that what cannot be loaded shows now."""
        if self._pooled:
            self._errands.prepare()

    def ask(self, key: Hashable, completion: str, problem: Problem) -> None:
        """The outcome comes out of `collect` under this key."""
        start_s, known = time.monotonic(), 0.0
        items: list[Item] = []
        weights: list[float] = []
        for name, weight in self._plan(problem).items():
            settled = self._settle(name, completion, problem)
            if isinstance(settled, Item):
                items.append(settled)
                weights.append(weight)
            else:
                known += weight * settled
        spent_s = time.monotonic() - start_s
        case = _Case(key, known, tuple(weights), spent_s)
        if items:
            self._errands.send(case, Ask(tuple(items)))
        else:
            self._finish(case, Verdict("ok"))

    def collect(self, wait_s: float = 0.0) -> list[tuple[Hashable, Outcome]]:
        """Outcomes so far, waiting at most this long for one."""
        for case, ask, verdict in self._errands.collect(0.0 if self._done else wait_s):
            self.peak_mb = max(self.peak_mb, verdict.peak_mb)
            case.seconds += verdict.seconds
            if verdict.status == "ok":
                self._remember(ask.items, verdict.rewards)
            self._finish(case, verdict)
        done, self._done = self._done, []
        return done

    def score(self, completion: str, problem: Problem) -> Outcome:
        """One answer, waited for. Not to be mixed with answers under way."""
        self.ask(None, completion, problem)
        while not (done := self.collect(1.0)):
            pass
        return done[0][1]

    def close(self) -> None:
        self._errands.close()

    def _plan(self, problem: Problem) -> dict[str, float]:
        if self._settings.combine:
            return self._settings.combine
        name = self._settings.scorer
        return {(problem.scorer or FALLBACK) if name == "auto" else name: 1.0}

    def _settle(self, name: str, completion: str, problem: Problem) -> float | Item:
        if name in self._safe:
            return self._safe[name](completion, problem.answer, problem.prompt)
        if name == "math":
            return self._settle_math(completion, problem.answer)
        return Item(name, pack_text(completion), pack_text(problem.answer), pack_text(problem.prompt))

    def _settle_math(self, completion: str, answer: str) -> float | Item:
        """Only the two answers go to the worker, and only where they must."""
        given, gold = final_answer(completion, self._settings.answer_from, formulas=True), gold_answer(answer)
        if given is None:
            return 0.0
        verdict = quick_verdict(given, gold)
        if verdict is not None:
            return verdict
        item = Item("math", pack_text(given), pack_text(gold), b"")
        return self._equal.get((item.answer, item.completion), item)

    def _load(self, name: str) -> None:
        scorer = make_safe_scorer(name, self._settings)
        if scorer is not None:
            self._safe[name] = scorer
        elif name in _IN_WORKERS or is_reference(name):
            self._pooled = (*self._pooled, name)
        else:
            raise ConfigError(f"reward.scorer: unknown scorer '{name}'; known: {', '.join(NAMES)}, or FILE.py:FUNCTION")

    def _setup(self) -> Setup:
        settings = self._settings
        return Setup(
            self._pooled,
            settings.pattern,
            settings.timeout_s + self._patience_s,
            settings.memory_mb,
            sandbox=self._sandbox,
            llm=self._llm,
            share_of_tests=settings.tests == "share",
        )

    @property
    def _patience_s(self) -> float:
        """What scorers with limits of their own may take on top."""
        running_s = self._sandbox.answer_s + self._sandbox.patience_s if "code" in self._pooled else 0.0
        asking_s = self._llm.patience_s if "llm_judge" in self._pooled else 0.0
        return (running_s + asking_s) / KILL_SHARE

    def _remember(self, items: Sequence[Item], rewards: Sequence[float]) -> None:
        """Samples of one prompt often agree. Only mathematics, whose verdict depends on nothing else, and only from a
        child that ran no foreign code."""
        if any(is_reference(item.scorer) for item in items):
            return
        if len(self._equal) >= _MAX_REMEMBERED:
            self._equal.clear()
        for item, reward in zip(items, rewards, strict=True):
            if item.scorer == "math":
                self._equal[item.answer, item.completion] = reward

    def _finish(self, case: _Case, verdict: Verdict) -> None:
        if verdict.status != "ok":
            self._done.append((case.key, Outcome(verdict.status, 0.0, verdict.reason, case.seconds, verdict.trace)))
            return
        judged = sum(weight * reward for weight, reward in zip(case.weights, verdict.rewards, strict=True))
        reward = case.known + judged
        if math.isfinite(reward):
            self._done.append((case.key, Outcome("ok", reward, "", case.seconds)))
        else:
            self._done.append((case.key, Outcome("error", 0.0, f"scorer gave {reward}", case.seconds)))
