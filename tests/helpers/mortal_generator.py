"""A generator that is killed once while it answers calls, as by a fault of its machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.executors.executor import Executor
from llamarl.messages import Message, Report, WorkOnGroup

FLAG = "LLAMARL_TEST_KILLED"  # names the file that says it has happened
NTH_CALL = 20


class MortalGenerator:
    def __init__(self, generator: Executor) -> None:
        self._generator, self._calls = generator, 0

    @property
    def idle(self) -> bool:
        return self._generator.idle

    def handle(self, message: Message) -> Iterable[Report]:
        yield from self._generator.handle(message)
        self._calls += isinstance(message, WorkOnGroup) and message.group.kind == "call"
        flag = Path(os.environ[FLAG])
        if self._calls == NTH_CALL and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def work(self) -> Iterable[Report]:
        return self._generator.work()


def build_mortal_generator(context: BuildContext) -> Executor:
    return MortalGenerator(build_generator(context))
