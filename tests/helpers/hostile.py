"""Executors that break every rule, for tests of the engine. Self-contained: children load this file by its path.

A plan says what each executor does wrong after each start: with `{"reward/0": ["garbage", "exits"]}` it misbehaves after its
first and second start, and behaves from the third on. The plan and the number of starts are in the folder $PLAN_FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from llamarl.builders.context import BuildContext
from llamarl.builders.generator import build_generator
from llamarl.builders.reward import build_reward
from llamarl.builders.trainer import build_trainer
from llamarl.engine.envelope import Envelope, encode
from llamarl.executors.executor import Executor
from llamarl.io.frames import encode_frame
from llamarl.messages import LoadWeights, Message, Report, WorkOnBatch, WorkOnGroup

PLAN_FOLDER = "LLAMARL_TEST_PLAN_FOLDER"
LONG_S = 60.0  # far longer than any test: a process that sleeps this long waits to be killed
PAUSE_S = 36.0  # longer than Monarch waits for word of a process before it takes it for dead, unless told otherwise
HONEST_FRAME = encode_frame(encode(Envelope((), ())))


def write_plan(folder: Path, plan: Mapping[str, Sequence[str]]) -> None:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))


def next_deed(executor: str) -> str:
    """What the executor does wrong after this start; "" for nothing."""
    folder = Path(os.environ[PLAN_FOLDER])
    lives = folder / f"{executor.replace('/', '-')}.lives"
    life = lives.stat().st_size if lives.exists() else 0
    with lives.open("a") as file:
        file.write(".")
    deeds = json.loads((folder / "plan.json").read_text()).get(executor, [])
    return deeds[life] if life < len(deeds) else ""


def engine_connection() -> socket.socket:
    """This process's connection to the engine: its only stream socket."""
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # not a socket, or the folder's own descriptor
        if found.family == socket.AF_UNIX and found.type == socket.SOCK_STREAM:
            return found
    raise AssertionError("no connection to the engine")


def say(data: bytes) -> None:
    """Send raw bytes instead of a frame, then wait to be killed."""
    engine_connection().sendall(data)
    time.sleep(LONG_S)


def say_half_a_frame_and_exit() -> None:
    engine_connection().sendall(HONEST_FRAME[:-1])
    os._exit(0)


def say_a_frame_slowly() -> None:
    connection = engine_connection()
    for byte in encode_frame(bytes(1000)):
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def hang_up() -> None:
    engine_connection().shutdown(socket.SHUT_RDWR)
    time.sleep(LONG_S)


def fail() -> None:
    raise ValueError("two lines\nmade one")


def pause() -> None:
    """Do nothing at all for `PAUSE_S`, as in the grip of a debugger or of swapped memory, then go on."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"])
    signal.raise_signal(signal.SIGSTOP)


DEEDS: dict[str, Callable[[], object]] = {
    "garbage": lambda: say(b"this is not a frame at all"),
    "truncated": say_half_a_frame_and_exit,
    "oversized": lambda: say(HONEST_FRAME[:8] + (2**63).to_bytes(8, "little")),
    "flipped": lambda: say(HONEST_FRAME[:-1] + bytes([HONEST_FRAME[-1] ^ 1])),
    "nonsense": lambda: say(encode_frame(encode({"no": "envelope"}))),
    "slow": say_a_frame_slowly,
    "hangs_up": hang_up,
    "raises": fail,
    "exits": lambda: os._exit(3),
    "killed": lambda: signal.raise_signal(signal.SIGKILL),
    "stopped": lambda: signal.raise_signal(signal.SIGSTOP),
    "paused": pause,
}


class Misbehaving:
    """An honest executor until the first message that `trigger` selects, at which it misbehaves."""

    def __init__(self, honest: Executor, deed: str, trigger: Callable[[Message], bool]) -> None:
        self._honest, self._deed, self._trigger = honest, deed, trigger

    def handle(self, message: Message) -> Iterable[Report]:
        if self._deed and self._trigger(message):
            DEEDS[self._deed]()
        return self._honest.handle(message)

    def work(self) -> Iterable[Report]:
        return self._honest.work()

    @property
    def idle(self) -> bool:
        return self._honest.idle


def _misbehaving(
    context: BuildContext, build: Callable[[BuildContext], Executor], trigger: Callable[[Message], bool]
) -> Executor:
    deed = next_deed(context.executor)
    if deed == "never_up":
        time.sleep(LONG_S)
    return Misbehaving(build(context), deed, trigger)


def misbehaving_generator(context: BuildContext) -> Executor:
    return _misbehaving(context, build_generator, lambda message: isinstance(message, WorkOnGroup))


def misbehaving_reward(context: BuildContext) -> Executor:
    return _misbehaving(context, build_reward, lambda message: isinstance(message, WorkOnGroup))


def misbehaving_trainer(context: BuildContext) -> Executor:
    """A trainer that misbehaves at its second update at the earliest, so that there is something to lose."""
    return _misbehaving(
        context, build_trainer, lambda message: isinstance(message, WorkOnBatch) and message.update == 1
    )


class LeaseKeeper:
    """A generator that stops forever while it loads weights."""

    def __init__(self, honest: Executor, context: BuildContext) -> None:
        self._honest, self._site = honest, context

    def handle(self, message: Message) -> Iterable[Report]:
        if isinstance(message, LoadWeights):
            with self._site.slots["trainer"].lease(message.version % 2):
                _lease_kept().touch()
                signal.raise_signal(
                    signal.SIGSTOP
                )  # takes effect in this thread at once; after `os.kill` it would run on for a moment
        return self._honest.handle(message)

    def work(self) -> Iterable[Report]:
        return self._honest.work()

    @property
    def idle(self) -> bool:
        return self._honest.idle


def _lease_kept() -> Path:
    return Path(os.environ[PLAN_FOLDER]) / "lease_kept"


def generator_that_may_keep_its_lease(context: BuildContext) -> Executor:
    """A generator that may keep its lease. The honest replica waits for that; otherwise it could end a short job first."""
    honest = build_generator(context)
    if next_deed(context.executor) == "keeps_lease":
        return LeaseKeeper(honest, context)
    while not _lease_kept().exists():
        time.sleep(0.01)
    return honest


class PairedReward:
    """A reward with two ranks: both record every message, agree on it by an all-reduce, and score it."""

    idle = True

    def __init__(self, context: BuildContext) -> None:
        self._honest, self._rank = build_reward(context), context.rank
        rank = f"{context.executor}-rank{context.rank}"
        self._deed = next_deed(rank)
        self._diary = Path(os.environ[PLAN_FOLDER]) / f"{rank.replace('/', '-')}.{os.getpid()}.diary"

    def handle(self, message: Message) -> Iterable[Report]:
        assert isinstance(message, WorkOnGroup)
        ordinal = message.group.ordinal
        if self._deed and ordinal >= 2:
            DEEDS[self._deed]()
        total = torch.tensor([ordinal, 1])
        dist.all_reduce(total)
        assert total.tolist() == [2 * ordinal, 2], "the ranks were not given the same message"
        with self._diary.open("a") as file:
            file.write(f"{ordinal}\n")
        return self._honest.handle(message)

    def work(self) -> Iterable[Report]:
        return ()


def paired_reward(context: BuildContext) -> Executor:
    assert context.num_ranks == dist.get_world_size() == 2
    group = dist.group.WORLD
    assert group is not None
    assert group._get_backend(torch.device("cpu")).options._timeout.days >= 1, (
        "gloo would end an executor that has had nothing to do for long"
    )
    return PairedReward(context)


class Failing:
    """An executor that fails at every message."""

    idle = True

    def handle(self, message: Message) -> Iterable[Report]:
        raise ValueError(f"no {type(message).__name__} for me")

    def work(self) -> Iterable[Report]:
        return ()


def failing_executor(context: BuildContext) -> Executor:
    return Failing()


class Idle:
    """An executor that accepts any message and does nothing."""

    idle = True

    def handle(self, message: Message) -> Iterable[Report]:
        return ()

    def work(self) -> Iterable[Report]:
        return ()


def idle_executor(context: BuildContext) -> Executor:
    return Idle()
