"""A generator that is slow while a file exists, so that a test can act on a job before it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.executors.executor import Executor
from llamarl.messages import Message, Report

PACE = "LLAMARL_TEST_PACE"  # environment variable with the path of the file
_SLICE_S = 0.2


class Paced:
    def __init__(self, honest: Executor) -> None:
        self._honest, self._file = honest, Path(os.environ[PACE])

    @property
    def idle(self) -> bool:
        return self._honest.idle

    def handle(self, message: Message) -> Iterable[Report]:
        return self._honest.handle(message)

    def work(self) -> Iterable[Report]:
        if self._file.exists():
            time.sleep(_SLICE_S)
        return self._honest.work()


def paced_generator(context: BuildContext) -> Executor:
    return Paced(build_generator(context))
