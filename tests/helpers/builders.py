"""Executors for tests, as a user would write them: top-level builder functions, passed as `Job(builders=...)`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random

from torch import Tensor

from llamarl.builders.context import BuildContext
from llamarl.builders.reward import build_reward
from llamarl.builders.trainer import build_trainer
from llamarl.executors.executor import Executor
from llamarl.executors.trainer import Trainer
from llamarl.messages import GroupResult, Message, Report, WorkOnBatch
from llamarl.types import Rollout, RolloutGroup

HASH_FILE = "LLAMARL_TEST_HASH_FILE"


def weights_sha256(parameters: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(name.encode())
        digest.update(parameters[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


class HashingTrainer:
    """A trainer that writes a line with the sha256 of its weights after every update."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def idle(self) -> bool:
        return self._trainer.idle

    def handle(self, message: Message) -> Iterable[Report]:
        reports = list(self._trainer.handle(message))
        if isinstance(message, WorkOnBatch):
            with Path(os.environ[HASH_FILE]).open("a") as file:
                file.write(weights_sha256(dict(self._trainer.model.named_parameters())) + "\n")
        return reports

    def work(self) -> Iterable[Report]:
        return self._trainer.work()


def hashing_trainer(context: BuildContext) -> Executor:
    trainer = build_trainer(context)
    assert isinstance(trainer, Trainer)
    return HashingTrainer(trainer)


class PermutedReward:
    """Real rewards, given to the wrong completions of the same group, so that nothing can be learned."""

    idle = True

    def __init__(self, reward: Executor, seed: int) -> None:
        self._reward, self._random = reward, Random(seed)

    def handle(self, message: Message) -> Iterable[Report]:
        for report in self._reward.handle(message):
            if isinstance(report, GroupResult) and isinstance(report.group, RolloutGroup):
                yield GroupResult(self._permute(report.group))
            else:
                yield report

    def work(self) -> Iterable[Report]:
        return ()

    def _permute(self, group: RolloutGroup) -> RolloutGroup:
        rewards = list(group.rewards)
        self._random.shuffle(rewards)
        pairs = zip(group.rollouts, rewards, strict=True)
        return RolloutGroup(group.prompt, tuple(Rollout(rollout.completion, reward) for rollout, reward in pairs))


def permuted_reward(context: BuildContext) -> Executor:
    return PermutedReward(build_reward(context), context.config.seed)
