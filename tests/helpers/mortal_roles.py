"""A teacher, a critic or a trainer that is killed once, in the middle of a job, as by a fault of its machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from llamarl.builders.context import BuildContext
from llamarl.builders.critic import build_critic
from llamarl.builders.teacher import build_teacher
from llamarl.builders.trainer import build_trainer
from llamarl.executors.executor import Executor
from llamarl.messages import Message, Report, WorkOnBatch

FLAG = "LLAMARL_TEST_KILLED"  # names the file that says it has happened
AT_UPDATE = 3


class MortalRole:
    def __init__(self, role: Executor) -> None:
        self._role = role

    @property
    def idle(self) -> bool:
        return self._role.idle

    def handle(self, message: Message) -> Iterable[Report]:
        flag = Path(os.environ[FLAG])
        if isinstance(message, WorkOnBatch) and message.update == AT_UPDATE and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._role.handle(message)

    def work(self) -> Iterable[Report]:
        return self._role.work()


def build_mortal_teacher(context: BuildContext) -> Executor:
    return MortalRole(build_teacher(context))


def build_mortal_trainer(context: BuildContext) -> Executor:
    return MortalRole(build_trainer(context))


def build_mortal_critic(context: BuildContext) -> Executor:
    return MortalRole(build_critic(context))
