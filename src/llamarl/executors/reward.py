"""The reward: completions in, rollouts out."""

from __future__ import annotations

import math
from collections.abc import Iterable

from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import GroupRefused, GroupResult, Message, Report, WorkOnGroup
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.scorers import Scorer
from llamarl.types import CompletionGroup, Rollout, RolloutGroup, bytes_to_tokens

_MAX_REASON = 200  # characters of a scorer's own words that go into the ledger


class Reward:
    idle = True  # a group is scored as soon as it arrives

    def __init__(self, tokenizer: Tokenizer, scorer: Scorer) -> None:
        self._tokenizer, self._scorer = tokenizer, scorer

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnGroup(group=CompletionGroup() as group):
                yield self._score(group)
            case _:
                raise UnexpectedMessage("reward", message)

    def work(self) -> Iterable[Report]:
        return ()

    def _score(self, group: CompletionGroup) -> Report:
        problem = group.prompt.problem
        rollouts = []
        for completion in group.completions:
            text = self._tokenizer.decode(bytes_to_tokens(completion.tokens).tolist())
            try:
                reward = float(self._scorer(text, problem.answer, problem.prompt))
            # A scorer may be the user's own: its failure is not a wrong answer.
            except (Exception, SystemExit) as error:
                said = " ".join(str(error).split())[:_MAX_REASON]
                return GroupRefused(group.ordinal, f"scorer failed: {type(error).__name__}: {said}")
            if not math.isfinite(reward):
                return GroupRefused(group.ordinal, f"scorer gave {reward}")
            rollouts.append(Rollout(completion, reward))
        return GroupResult(RolloutGroup(group.prompt, tuple(rollouts)))
