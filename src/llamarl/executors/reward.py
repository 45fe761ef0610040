"""The reward: completions in, rollouts out. The judge's workers may have several groups under way at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from llamarl.executors.executor import UnexpectedMessage
from llamarl.generate.prompting import judged_text
from llamarl.messages import GroupRefused, GroupResult, Message, MustStop, Noted, Report, ScoresFailed, WorkOnGroup
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.failures import FailureLog, FailureShare, to_stderr
from llamarl.tasks.judge import Judge, Judgment
from llamarl.types import (
    Completion,
    CompletionGroup,
    PromptGroup,
    Rollout,
    RolloutGroup,
    WrittenAnswer,
    last_of_samples,
    unjudged,
)

_SLICE_S = 0.02  # the time that a new message may wait


class Reward:
    """Judging may fail for `max_failure_share` of the answers. Beyond that the job is stopped, since the scorer is at fault.
    In a deterministic job a time-out stops it at once: it is not a property of the answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        judge: Judge,
        *,
        judged: str = "last",
        max_failure_share: float = 1.0,
        deterministic: bool = False,
        log: Callable[[str], None] = to_stderr,
    ) -> None:
        self._tokenizer, self._judge, self._judged = tokenizer, judge, judged
        self._max_failure_share, self._deterministic = max_failure_share, deterministic
        self._failures, self._log = FailureShare(max_failure_share), FailureLog(log)
        self._underway: dict[int, tuple[CompletionGroup, list[Judgment | None]]] = {}

    @property
    def idle(self) -> bool:
        return not self._underway

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnGroup(group=CompletionGroup(prompt=PromptGroup(written=WrittenAnswer())) as group):
                return [GroupResult(unjudged(group))]
            case WorkOnGroup(group=CompletionGroup() as group):
                self._begin(group)
                return self._collect(0.0)
            case _:
                raise UnexpectedMessage("reward", message)

    def work(self) -> Iterable[Report]:
        return self._collect(_SLICE_S)

    def _begin(self, group: CompletionGroup) -> None:
        judged = last_of_samples(group.completions)
        self._underway[group.ordinal] = (group, [None] * len(judged))
        texts = [judged_text(self._tokenizer, completion, self._judged) for completion in judged]
        keys = [(group.ordinal, sample) for sample in range(len(texts))]
        self._judge.ask_all(keys, texts, group.prompt.problem)

    def _collect(self, wait_s: float) -> list[Report]:
        reports: list[Report] = []
        for key, outcome in self._judge.collect(wait_s):
            ordinal, sample = cast(tuple[int, int], key)
            group, outcomes = self._underway[ordinal]
            outcomes[sample] = outcome
            self._failures.note(failed=outcome.status != "ok")
            if outcome.status != "ok" and self._log.note(_in_words(outcome), outcome.trace):
                reports.append(Noted(_in_words(outcome)))
            if all(one is not None for one in outcomes):
                del self._underway[ordinal]
                reports.append(_report(group, [one for one in outcomes if one is not None]))
            if self._deterministic and outcome.status == "timeout":
                reports.append(
                    MustStop(f"judging group {ordinal} {outcome.reason}; schedule.deterministic allows none")
                )
        return [*reports, *self._tell_failures()]

    def _tell_failures(self) -> Iterable[Report]:
        if counts := self._judge.take_counts():
            yield ScoresFailed(counts.failures, counts.timeouts)
            if excess := self._failures.excess:
                yield MustStop(
                    f"{excess[0]} of the last {excess[1]} answers could not be judged; more than "
                    f"reward.max_failure_share={self._max_failure_share:g}; the last: {self._log.last}"
                )


def _report(group: CompletionGroup, outcomes: list[Judgment]) -> Report:
    """A group is judged whole or dropped: a missing reward cannot be made up."""
    for outcome in outcomes:
        if outcome.status != "ok":
            return GroupRefused(group.ordinal, _in_words(outcome))
    pairs = zip(group.completions, _of_branches(group, outcomes), strict=True)
    return GroupResult(RolloutGroup(group.prompt, tuple(_rollout(c, outcome) for c, outcome in pairs)))


def _of_branches(group: CompletionGroup, outcomes: list[Judgment]) -> list[Judgment]:
    """The outcome of each completion: its own, or that of the agent's sample that it is a branch of."""
    if len(outcomes) == len(group.completions):
        return outcomes
    samples = dict(zip((one.sample for one in last_of_samples(group.completions)), outcomes, strict=True))
    return [samples[completion.sample] for completion in group.completions]


def _rollout(completion: Completion, outcome: Judgment) -> Rollout:
    return Rollout(completion, outcome.reward, parts=outcome.parts)


def _in_words(outcome: Judgment) -> str:
    return f"scorer {outcome.reason}" if outcome.status == "timeout" else outcome.reason
