"""Executors of a job with agents that are killed once, in the middle of calls, as by a fault of their machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from llamarl.builders.agent import build_agents
from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.executors.executor import Executor
from llamarl.messages import CallAnswered, Message, Report, WorkOnGroup

FLAG = "LLAMARL_TEST_KILLED"  # names the file that says it has happened
NTH_CALL = 12


class MortalExecutor:
    """Dies with its 12th call."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._calls = executor, 0

    @property
    def idle(self) -> bool:
        return self._executor.idle

    def handle(self, message: Message) -> Iterable[Report]:
        yield from self._executor.handle(message)
        given = isinstance(message, WorkOnGroup) and message.group.kind == "call"
        self._calls += given or isinstance(message, CallAnswered)
        flag = Path(os.environ[FLAG])
        if self._calls == NTH_CALL and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def work(self) -> Iterable[Report]:
        return self._executor.work()


def build_mortal_generator(context: BuildContext) -> Executor:
    return MortalExecutor(build_generator(context))


def build_mortal_agents(context: BuildContext) -> Executor:
    return MortalExecutor(build_agents(context))
