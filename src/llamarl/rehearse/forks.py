"""Runs rehearsals in forked processes, as many at once as there are cores: each takes a core for a minute."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence

import msgspec

from llamarl.errors import InputError, LlamaRLError
from llamarl.rehearse.memory import RankMemory

Rehearsal = Callable[[], RankMemory]


class _Answer(msgspec.Struct, frozen=True):
    memory: RankMemory | None = None
    problem: str = ""


def run_in_forks(rehearsals: Sequence[Rehearsal]) -> list[RankMemory]:
    """What each of them found. Raises InputError with the problem of one that could not be carried out."""
    waiting, running, answers = list(enumerate(rehearsals)), dict[int, tuple[int, int]](), dict[int, bytes]()
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            number, rehearsal = waiting.pop(0)
            process, pipe = _fork(rehearsal)
            running[pipe] = number, process
        for pipe in select.select(list(running), [], [])[0]:
            number, process = running[pipe]
            if data := os.read(pipe, 1 << 16):
                answers[number] = answers.get(number, b"") + data
            else:
                os.close(pipe)
                del running[pipe]
                os.waitpid(process, 0)
    return [_memory(answers.get(number, b"")) for number in range(len(rehearsals))]


def _fork(rehearsal: Rehearsal) -> tuple[int, int]:
    """Starts a process; returns its id, and the pipe that its answer comes from."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    if process := os.fork():
        os.close(writing)
        return process, reading
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(_answer(rehearsal)))
    finally:
        os._exit(0)


def _answer(rehearsal: Rehearsal) -> _Answer:
    try:
        return _Answer(rehearsal())
    except LlamaRLError as error:
        return _Answer(problem=str(error))
    except Exception as error:  # torch refuses a layout in many ways
        return _Answer(problem=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def _memory(data: bytes) -> RankMemory:
    if not data:
        raise InputError("--build: the process of a rank has died; is there too little memory on this machine?")
    answer = msgspec.msgpack.decode(data, type=_Answer)
    if answer.memory is None:
        raise InputError(f"--build: {answer.problem}")
    return answer.memory
