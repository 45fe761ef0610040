"""The reward model: rollouts in, rollouts out, with the score of a model added to their reward."""

from __future__ import annotations

import math
from collections.abc import Iterable

from llamarl.config import RewardModelConfig
from llamarl.errors import ModelError
from llamarl.executors.executor import UnexpectedMessage
from llamarl.generate.prompting import asked_turns, judged_text
from llamarl.messages import GroupRefused, GroupResult, Message, Report, WorkOnGroup
from llamarl.model.classifier import Classifier
from llamarl.model.tokenizer import Tokenizer
from llamarl.types import Completion, Problem, Rollout, RolloutGroup

SCORER, REWARD_MODEL = "scorer", "reward_model"  # names of the parts of a reward


class RewardModel:
    """`spoken` is the policy's tokenizer, `own` the reward model's; the two models may be of different families."""

    idle = True  # a group is answered as soon as it arrives

    def __init__(
        self,
        classifier: Classifier,
        own: Tokenizer,
        spoken: Tokenizer,
        settings: RewardModelConfig,
        *,
        judged: str = "last",
    ) -> None:
        self._classifier, self._own, self._spoken = classifier, own, spoken
        self._settings, self._judged = settings, judged

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnGroup(group=RolloutGroup() as group):
                yield self._judge(group) if group.prompt.written is None else GroupResult(group)
            case _:
                raise UnexpectedMessage("reward model", message)

    def work(self) -> Iterable[Report]:
        return ()

    def _judge(self, group: RolloutGroup) -> Report:
        texts = [self._tokens(group.prompt.problem, rollout.completion) for rollout in group.rollouts]
        longest = max(map(len, texts))
        if longest > self._classifier.max_tokens:
            return GroupRefused(
                group.ordinal, f"reward model: {longest} tokens, it has {self._classifier.max_tokens} positions"
            )
        scores = self._classifier.scores(texts)
        if not all(map(math.isfinite, scores)):
            return GroupRefused(group.ordinal, "reward model: its score is not a number")
        pairs = zip(group.rollouts, scores, strict=True)
        return GroupResult(RolloutGroup(group.prompt, tuple(self._add(rollout, score) for rollout, score in pairs)))

    def _add(self, rollout: Rollout, score: float) -> Rollout:
        worth = 1 / (1 + math.exp(-max(-50.0, min(50.0, score)))) if self._settings.squash else score
        parts = {**(rollout.parts or {SCORER: rollout.reward}), REWARD_MODEL: worth}
        return Rollout(rollout.completion, rollout.reward + self._settings.weight * worth, rollout.columns, parts)

    def _tokens(self, problem: Problem, completion: Completion) -> list[int]:
        """Question and answer as a chat, where the reward model has a chat template; else in a row."""
        text = judged_text(self._spoken, completion, self._judged)
        if self._own.has_chat:
            turns = [{"role": turn.role, "content": turn.content} for turn in asked_turns(problem)]
            return self._own.chat([*turns, {"role": "assistant", "content": text}], add_generation_prompt=False)
        tokens = self._own.encode(problem.prompt + text, add_special_tokens=True)
        if not tokens:
            raise ModelError("reward model: its tokenizer makes nothing of question and answer")
        return tokens
