"""Executors with random delays, on which the results of a run must not depend."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.builders.reward import build_reward
from llamarl.builders.trainer import build_trainer
from llamarl.executors.executor import Executor
from llamarl.messages import Message, Report


class Jittery:
    """An executor with random delays before it receives and before it works."""

    def __init__(self, executor: Executor, seed: float) -> None:
        self._executor, self._chance = executor, random.Random(seed)

    @property
    def idle(self) -> bool:
        return self._executor.idle

    def handle(self, message: Message) -> Iterable[Report]:
        time.sleep(self._chance.choice([0, 0, 0.001, 0.02]))
        return self._executor.handle(message)

    def work(self) -> Iterable[Report]:
        time.sleep(self._chance.choice([0, 0, 0.001, 0.005]))
        return self._executor.work()


def jittery_generator(context: BuildContext) -> Executor:
    return Jittery(build_generator(context), time.time())


def jittery_reward(context: BuildContext) -> Executor:
    return Jittery(build_reward(context), time.time())


def jittery_trainer(context: BuildContext) -> Executor:
    return Jittery(build_trainer(context), time.time())
