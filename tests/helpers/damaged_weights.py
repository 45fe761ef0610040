"""A generator that, on hosts where an environment variable says so, receives weights with one byte altered."""

from __future__ import annotations

import os

from torch import Tensor

from helpers.pace import paced_generator
from llamarl.builders.context import BuildContext
from llamarl.executors.executor import Executor
from llamarl.weights import group_transport
from llamarl.weights.buckets import is_sound

DAMAGED = "LLAMARL_TEST_DAMAGED_WEIGHTS"


def perhaps_damaged_generator(context: BuildContext) -> Executor:
    if os.environ.get(DAMAGED):

        def alter_and_verify(message: Tensor) -> bool:
            message[0] ^= 1
            return is_sound(message)

        group_transport.is_sound = alter_and_verify  # type: ignore[attr-defined]
    return paced_generator(context)
