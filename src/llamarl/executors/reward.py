"""The reward: completions in, rollouts out. Several groups may be under way in the judge's workers at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import cast

from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import GaveUp, GroupRefused, GroupResult, Message, Report, ScoresFailed, WorkOnGroup
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.judge import Counts, Judge, Outcome
from llamarl.types import CompletionGroup, Rollout, RolloutGroup, bytes_to_tokens

_SLICE_S = 0.02  # so long may a new message wait
_REMEMBERED = 1000  # answers over which the share of failures is taken
_LEAST = 100  # answers that a share is taken of, so that the first failure of a job is not all there is


class Reward:
    """`max_failure_share` of the answers may fail to be judged; beyond that the job is stopped, since what is wrong is the
    scorer. In a deterministic job a time-out stops it at once: it is no property of the answer."""

    def __init__(
        self, tokenizer: Tokenizer, judge: Judge, *, max_failure_share: float = 1.0, deterministic: bool = False
    ) -> None:
        self._tokenizer, self._judge = tokenizer, judge
        self._max_failure_share, self._deterministic = max_failure_share, deterministic
        self._underway: dict[int, tuple[CompletionGroup, list[Outcome | None]]] = {}
        self._failed: deque[bool] = deque(maxlen=_REMEMBERED)

    @property
    def idle(self) -> bool:
        return not self._underway

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnGroup(group=CompletionGroup() as group):
                self._begin(group)
                return self._collect(0.0)
            case _:
                raise UnexpectedMessage("reward", message)

    def work(self) -> Iterable[Report]:
        return self._collect(_SLICE_S)

    def _begin(self, group: CompletionGroup) -> None:
        self._underway[group.ordinal] = (group, [None] * len(group.completions))
        for sample, completion in enumerate(group.completions):
            text = self._tokenizer.decode(bytes_to_tokens(completion.tokens).tolist())
            self._judge.ask((group.ordinal, sample), text, group.prompt.problem)

    def _collect(self, wait_s: float) -> list[Report]:
        reports: list[Report] = []
        for key, outcome in self._judge.collect(wait_s):
            ordinal, sample = cast(tuple[int, int], key)
            group, outcomes = self._underway[ordinal]
            outcomes[sample] = outcome
            self._failed.append(outcome.status != "ok")
            if all(one is not None for one in outcomes):
                del self._underway[ordinal]
                reports.append(_report(group, [one for one in outcomes if one is not None]))
            if self._deterministic and outcome.status == "timeout":
                reports.append(GaveUp(f"judging group {ordinal} {outcome.reason}; schedule.deterministic allows none"))
        return [*reports, *self._failures()]

    def _failures(self) -> Iterable[Report]:
        counts, self._judge.counts = self._judge.counts, Counts()
        if counts.failures or counts.timeouts:
            yield ScoresFailed(counts.failures, counts.timeouts)
            failed, allowed = sum(self._failed), self._max_failure_share * max(len(self._failed), _LEAST)
            if failed > allowed:
                yield GaveUp(
                    f"{failed} of the last {len(self._failed)} answers could not be judged; more than "
                    f"reward.max_failure_share={self._max_failure_share:g}"
                )


def _report(group: CompletionGroup, outcomes: list[Outcome]) -> Report:
    """A group is judged whole or dropped: a reward that is missing cannot be made up."""
    for outcome in outcomes:
        if outcome.status != "ok":
            return GroupRefused(group.ordinal, _in_words(outcome))
    pairs = zip(group.completions, outcomes, strict=True)
    return GroupResult(RolloutGroup(group.prompt, tuple(Rollout(c, outcome.reward) for c, outcome in pairs)))


def _in_words(outcome: Outcome) -> str:
    return f"scorer {outcome.reason}" if outcome.status == "timeout" else outcome.reason
