"""A generator that is slow while a file exists, so that a test can act on a job before it ends.

Its builder is loaded by file, on hosts that know no other helpers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.executors.executor import Executor
from llamarl.messages import Message, Report
from llamarl.weights import group_transport
from llamarl.weights.buckets import is_sound

DAMAGED = "LLAMARL_TEST_DAMAGED_WEIGHTS"  # environment variable of hosts on which one byte of all weights is altered
PACE = "LLAMARL_TEST_PACE"  # environment variable with the path of the file
_SLICE_S, _LATER_S = 0.2, 2.0
_SOON = 100  # slices: what takes longer has a busy machine, and the job must not end before it


class Paced:
    def __init__(self, honest: Executor) -> None:
        self._honest, self._file, self._slices = honest, Path(os.environ[PACE]), 0

    @property
    def idle(self) -> bool:
        return self._honest.idle

    def handle(self, message: Message) -> Iterable[Report]:
        return self._honest.handle(message)

    def work(self) -> Iterable[Report]:
        if self._file.exists():
            time.sleep(_SLICE_S if self._slices < _SOON else _LATER_S)
            self._slices += 1
        return self._honest.work()


def paced_generator(context: BuildContext) -> Executor:
    return Paced(build_generator(context))


def perhaps_damaged_generator(context: BuildContext) -> Executor:
    """A paced generator; where `DAMAGED` is set, it receives weights with one byte altered."""
    if os.environ.get(DAMAGED):

        def alter_and_verify(message: Tensor) -> bool:
            message[0] ^= 1
            return is_sound(message)

        group_transport.is_sound = alter_and_verify  # type: ignore[attr-defined]
    return paced_generator(context)
