"""The judge: turns completions into judgments, by one scorer or several, in this process or in workers.

Safe scorers and the user's trusted functions are called in this process. Symbolic scorers, patterns and all other functions
of the user run in a pool of workers. A verdict is a number or a failure. A failure is retried, then reported as a failure,
never as a wrong answer.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llamarl.config import Config, LLMJudgeConfig, RewardConfig, SandboxConfig
from llamarl.errors import ConfigError
from llamarl.plugins import is_reference, load_function
from llamarl.tasks.custom_scorers import Function, ScorerRequirements, Signature, missing_column
from llamarl.tasks.extract import final_answer, gold_answer
from llamarl.tasks.failures import Counts
from llamarl.tasks.in_process_scorers import InProcessScorers
from llamarl.tasks.math.quick_verdict import quick_verdict
from llamarl.tasks.scorers import Scorer, make_safe_scorer
from llamarl.tasks.workers.protocol import KILL_SHARE, Item, Setup, Status, Verdict, WorkRequest, pack_text
from llamarl.tasks.workers.retrying_pool import RetryingPool
from llamarl.types import Problem

NAMES = (
    "exact",
    "numeric",
    "choice",
    "regex",
    "math",
    "format",
    "length",
    "code",
    "llm_judge",
    "reasoning_gym",
    "none",
)
_IN_WORKERS = ("regex", "math", "code", "llm_judge", "reasoning_gym")
_BY_COLUMNS = "reasoning_gym"  # its problems bring the columns that it asks for
_MAX_CACHED = 10_000
FALLBACK = "exact"  # for a task that names no scorer
_DEFAULT_SANDBOX, _DEFAULT_LLM = SandboxConfig(), LLMJudgeConfig()
_NO_FUNCTIONS: Mapping[str, Function] = {}
_WITHOUT_ANSWER = {"none", "format", "length", "llm_judge"}  # scorers that do not need an answer


class Judgment(Struct, frozen=True):
    """The result of judging one answer. `reward` is valid only if the status is ok."""

    status: Status
    reward: float = 0.0
    reason: str = ""
    seconds: float = 0.0
    trace: str = ""  # traceback of an exception in the user's own function
    parts: dict[str, float] = {}  # what each scorer gave, where reward.combine names several


@dataclass
class _Case:
    """An answer that is being judged: its reward so far, and the number of parts that are still missing."""

    key: Hashable
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # by scorer, before its weight
    seconds: float = 0.0
    waiting: int = 1  # starts at 1 for `ask_all` itself
    failed: Verdict | None = None

    def add(self, scorer: str, weight: float, reward: float) -> None:
        self.reward += weight * reward
        self.parts[scorer] = reward


# One request: for each reward that it returns, the case, the scorer and the weight of the reward in the case.
_Part = tuple[tuple[_Case, str, float], ...]


class Judge:
    """Judges answers. `own` names the task's scorers, for reward.scorer=auto. `given` maps names in settings to functions,
    which run here, as all functions of the user do with reward.trusted."""

    def __init__(
        self,
        settings: RewardConfig,
        own: Sequence[str] = (FALLBACK,),
        *,
        sandbox: SandboxConfig = _DEFAULT_SANDBOX,
        llm: LLMJudgeConfig = _DEFAULT_LLM,
        given: Mapping[str, Function] = _NO_FUNCTIONS,
        raises: bool = False,
    ) -> None:
        self._settings, self._sandbox, self._llm = settings, sandbox, llm
        self.peak_mb = 0.0  # peak memory of judging one answer in a worker
        self._safe: dict[str, Scorer] = {}
        self._pooled: tuple[str, ...] = ()
        self._pool: RetryingPool[tuple[_Part, ...]] = RetryingPool(self._setup, settings.workers, settings.retries)
        self._gathered: deque[tuple[_Part, Item]] = deque()  # items for coroutines that wait for a free worker
        self._num_gathered = 0  # number of bundles of such items in workers
        self._math_verdicts: dict[tuple[bytes, bytes], float] = {}  # symbolic verdicts by (answer, completion)
        self._done: list[tuple[Hashable, Judgment]] = []
        alone = own if settings.scorer == "auto" else [settings.scorer]
        self._names = tuple(settings.combine or dict.fromkeys(alone))
        trusted: dict[str, Function] = {}
        for name in self._names:
            if name in given or (settings.trusted and is_reference(name)):
                trusted[name] = given[name] if name in given else load_function("reward.scorer", name)
            else:
                self._load(name)
        self._trusted: InProcessScorers[_Part] = InProcessScorers(trusted, settings, raises=raises)
        if settings.trusted and not trusted:
            raise ConfigError("reward.trusted: cannot take effect without a scorer of your own, as FILE.py:FUNCTION")
        if "regex" in self._pooled and not settings.pattern:
            raise ConfigError("reward.pattern: the regex scorer needs one")

    @classmethod
    def of(
        cls, config: Config, own: Sequence[str], *, workers: int = 0, given: Mapping[str, Function] = _NO_FUNCTIONS
    ) -> Judge:
        """Make the job's judge, optionally with another number of workers. On `inline`, which is for debugging, exceptions
        of trusted functions are not caught."""
        settings = replace(config.reward, workers=workers) if workers else config.reward
        raises = config.engine.kind == "inline"
        return cls(settings, own, sandbox=config.sandbox, llm=config.llm_judge, given=given, raises=raises)

    @property
    def num_pending(self) -> int:
        return self.num_waiting + len(self._done)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are running, or wait for a worker or a coroutine."""
        return len(self._pool) + len(self._gathered) + len(self._trusted)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._pool.worker_pids

    @property
    def counts(self) -> Counts:
        """Failed attempts since the counts were last taken."""
        here, away = self._trusted.counts, self._pool.counts
        return Counts(here.failures + away.failures, here.timeouts + away.timeouts)

    def take_counts(self) -> Counts:
        counts, self._pool.counts, self._trusted.counts = self.counts, Counts(), Counts()
        return counts

    def prepare(self) -> None:
        """Start the workers, if any are needed, so that a scorer that cannot be loaded fails now."""
        if self._pooled:
            self._pool.prepare()

    @cached_property
    def signatures(self) -> dict[str, Signature]:
        """How the user's own scorers are called. Waits for the workers."""
        if any(name == _BY_COLUMNS or is_reference(name) for name in self._pooled):
            self.prepare()
        return {**self._pool.signatures, **self._trusted.signatures}

    @property
    def wanted(self) -> ScorerRequirements:
        """What the scorers need of the data."""
        signatures = {name: one for name, one in self.signatures.items() if name != _BY_COLUMNS}
        others = set(self._names) - signatures.keys()
        return ScorerRequirements.by(signatures, answer=not others <= _WITHOUT_ANSWER)

    def ask(self, key: Hashable, completion: str, problem: Problem) -> None:
        """Submit one answer; `collect` returns its judgment under this key."""
        self.ask_all([key], [completion], problem)

    def ask_all(self, keys: Sequence[Hashable], completions: Sequence[str], problem: Problem) -> None:
        """Submit all answers to one prompt; scorers that take several answers get them together."""
        cases, plan, own = [_Case(key) for key in keys], self._plan(problem), self.signatures
        for name, weight in plan.items():
            if name in own:
                self._ask_own(name, weight, cases, completions, problem)
        others = {name: weight for name, weight in plan.items() if name not in own}
        for case, completion in zip(cases, completions, strict=True):
            if others:
                self._ask_one(case, completion, problem, others)
            self._part_done(case)

    def collect(self, wait_s: float = 0.0) -> list[tuple[Hashable, Judgment]]:
        """Return finished judgments, after waiting at most `wait_s` for one."""
        self._send_gathered()
        for part, verdict in self._trusted.collect(0.0 if self._done or self._pool else wait_s):
            self._take(part, verdict)
        for parts, request, verdict in self._pool.collect(0.0 if self._done else wait_s):
            self.peak_mb = max(self.peak_mb, verdict.peak_mb)
            if request.gathered:
                self._take_gathered(parts, request, verdict)
                continue
            if verdict.status == "ok":
                self._cache_verdicts(request.items, verdict.rewards)
            self._take(parts[0], verdict)
        self._send_gathered()
        done, self._done = self._done, []
        return done

    def score(self, completion: str, problem: Problem) -> Judgment:
        """Judge one answer and wait for it. No other answers may be in progress."""
        return self.score_all([completion], problem)[0]

    def score_all(self, completions: Sequence[str], problem: Problem) -> list[Judgment]:
        """Judge the answers to a prompt and wait for them. No others may be in progress."""
        self.ask_all(range(len(completions)), completions, problem)
        done: dict[Hashable, Judgment] = {}
        while len(done) < len(completions):
            done.update(self.collect(1.0))
        return [done[number] for number in range(len(completions))]

    def close(self) -> None:
        self._pool.close()
        self._trusted.close()

    # The user's own scorers

    def _ask_own(
        self,
        name: str,
        weight: float,
        cases: Sequence[_Case],
        completions: Sequence[str],
        problem: Problem,
    ) -> None:
        """Submit the answers together or one by one, as the function takes them."""
        signature = self.signatures[name]
        columns = {column: value for column, value in problem.columns.items() if signature.wants(column)}
        missing = [column for column in signature.columns if column not in columns]
        bundles = [range(len(cases))] if signature.batched else [range(n, n + 1) for n in range(len(cases))]
        for bundle in bundles:
            part = tuple((cases[index], name, weight) for index in bundle)
            texts = [completions[index] for index in bundle]
            for case, _, _ in part:
                case.waiting += 1
            if missing:
                self._pool.counts.add("error")
                self._take(part, Verdict("error", reason=missing_column(name, missing[0], problem.columns)))
            elif name in self._trusted:
                verdict = self._trusted.ask(part, name, texts, problem.answer, problem.prompt, columns)
                if verdict is not None:
                    self._take(part, verdict)
            elif signature.is_async:
                self._gathered.append((part, _item(name, texts, problem, columns)))
            else:
                self._pool.send((part,), WorkRequest((_item(name, texts, problem, columns),)))

    def _send_gathered(self) -> None:
        """Send waiting items to free workers, at most reward.concurrency to each; the rest waits."""
        while self._gathered and (free := self._settings.workers - self._num_gathered) > 0:
            count = min(self._settings.concurrency, math.ceil(len(self._gathered) / free))
            bundle = [self._gathered.popleft() for _ in range(count)]
            self._num_gathered += 1
            request = WorkRequest(tuple(item for _, item in bundle), gathered=True)
            self._pool.send(tuple(part for part, _ in bundle), request, retries=0)

    def _take_gathered(self, parts: tuple[_Part, ...], request: WorkRequest, verdict: Verdict) -> None:
        """Take the verdicts of a bundle. Failed items are retried alone; if the whole bundle failed, one item may have
        caused it."""
        self._num_gathered -= 1
        together = verdict.status != "ok"
        each = (verdict,) * len(parts) if together else verdict.each
        for part, item, one in zip(parts, request.items, each, strict=True):
            if not together:
                self._pool.counts.add(one.status)
            if one.status == "ok" or not (self._settings.retries or (together and len(parts) > 1)):
                self._take(part, one)
            else:
                self._pool.send((part,), WorkRequest((item,)), retries=max(0, self._settings.retries - 1))

    # Verdicts

    def _take(self, part: _Part, verdict: Verdict) -> None:
        cases = {id(case): case for case, _, _ in part}.values()
        if verdict.status == "ok":
            for (case, name, weight), reward in zip(part, verdict.rewards, strict=True):
                case.add(name, weight, reward)
        for case in cases:
            case.failed = case.failed or (verdict if verdict.status != "ok" else None)
            case.seconds += verdict.seconds / len(cases)
            self._part_done(case)

    def _plan(self, problem: Problem) -> dict[str, float]:
        if self._settings.combine:
            return self._settings.combine
        name = self._settings.scorer
        return {(problem.scorer or FALLBACK) if name == "auto" else name: 1.0}

    def _ask_one(self, case: _Case, completion: str, problem: Problem, plan: Mapping[str, float]) -> None:
        """Score here what can be scored here, and send one request to a worker for all other scorers."""
        start_s = time.monotonic()
        items: list[Item] = []
        part: list[tuple[_Case, str, float]] = []
        for name, weight in plan.items():
            settled = self._score_here(name, completion, problem)
            if isinstance(settled, Item):
                items.append(settled)
                part.append((case, name, weight))
            else:
                case.add(name, weight, settled)
        case.seconds += time.monotonic() - start_s
        if items:
            case.waiting += 1
            self._pool.send((tuple(part),), WorkRequest(tuple(items)))

    def _score_here(self, name: str, completion: str, problem: Problem) -> float | Item:
        if name in self._safe:
            return self._safe[name](completion, problem.answer, problem.prompt)
        if name == "math":
            return self._score_math_here(completion, problem.answer)
        return _item(name, [completion], problem, {})

    def _score_math_here(self, completion: str, answer: str) -> float | Item:
        """Decide here if possible. Otherwise the worker gets only the two answers, not the completion."""
        given, gold = final_answer(completion, self._settings.answer_from, formulas=True), gold_answer(answer)
        if given is None:
            return 0.0
        verdict = quick_verdict(given, gold)
        if verdict is not None:
            return verdict
        item = Item("math", (pack_text(given),), pack_text(gold), b"")
        return self._math_verdicts.get((item.answer, item.completions[0]), item)

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
            answer_from=settings.answer_from,
        )

    @property
    def _patience_s(self) -> float:
        """Additional time for scorers that have their own time limits."""
        running_s = self._sandbox.answer_s + self._sandbox.patience_s if "code" in self._pooled else 0.0
        asking_s = self._llm.patience_s if "llm_judge" in self._pooled else 0.0
        return (running_s + asking_s) / KILL_SHARE

    def _cache_verdicts(self, items: Sequence[Item], rewards: Sequence[float]) -> None:
        """Cache verdicts, since samples of one prompt often agree. Only those of the math scorer, which depend on nothing
        else, and only from a child that ran no user code."""
        if any(is_reference(item.scorer) for item in items):
            return
        if len(self._math_verdicts) >= _MAX_CACHED:
            self._math_verdicts.clear()
        for item, reward in zip(items, rewards, strict=True):
            if item.scorer == "math":
                self._math_verdicts[item.answer, item.completions[0]] = reward

    def _part_done(self, case: _Case) -> None:
        case.waiting -= 1
        if case.waiting:
            return
        verdict = case.failed
        if verdict is not None:
            outcome = Judgment(verdict.status, 0.0, verdict.reason, case.seconds, verdict.trace)
        elif math.isfinite(case.reward):
            parts = case.parts if self._settings.combine else {}
            outcome = Judgment("ok", case.reward, seconds=case.seconds, parts=parts)
        else:
            outcome = Judgment("error", 0.0, f"scorer gave {case.reward}", case.seconds)
        self._done.append((case.key, outcome))


def _item(name: str, completions: Sequence[str], problem: Problem, columns: Mapping[str, Any]) -> Item:
    texts = tuple(map(pack_text, completions))
    return Item(name, texts, pack_text(problem.answer), pack_text(problem.prompt), json.dumps(columns).encode())
