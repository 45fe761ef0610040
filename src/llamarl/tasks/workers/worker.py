"""A worker: loads its scorers once, then forks a child for every answer, so that no answer can touch the next.

Run as a program: `python -m llamarl.tasks.workers.worker FD PARENT`. The worker itself never looks into a completion. The
child does, under limits, and says one verdict over a pipe of its own; when it is late it is killed.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from llamarl.errors import LlamaRLError
from llamarl.plugins import is_reference, load_function
from llamarl.tasks.programs import load_examiner
from llamarl.tasks.symbolic import load_equal
from llamarl.tasks.workers.confine import Refused, adopt_orphans, die_with_parent, limit, seal
from llamarl.tasks.workers.wire import (
    Ask,
    Inbox,
    Item,
    NotReady,
    Ready,
    Setup,
    Verdict,
    decode_ask,
    decode_setup,
    decode_verdict,
    encode,
    send,
    unpack_text,
)

_MAX_REASON = 200
_KILL_SHARE = 0.9  # of the time limit: the rest is for killing, so that the limit itself is kept
_MAX_VERDICT_BYTES = 1 << 12
_LENGTH = struct.Struct("<H")
Scorer = Callable[[str, str, str], Any]


def load_scorers(setup: Setup) -> dict[str, Scorer]:
    return {name: _load(name, setup) for name in setup.scorers}


def _load(name: str, setup: Setup) -> Scorer:
    if name == "math":
        equal = load_equal()
        return lambda completion, answer, prompt: float(equal(answer, completion))
    if name == "regex":
        return _regex_scorer(setup.pattern)
    if name == "code":
        return load_examiner(setup.sandbox, share=setup.share_of_tests)
    return load_function("reward.scorer", name)


def _regex_scorer(source: str) -> Scorer:
    """Found or not; where the pattern has a group, the last match's first group must be the answer."""
    pattern = re.compile(source)

    def score(completion: str, answer: str, prompt: str) -> float:
        last = None
        for last in pattern.finditer(completion):  # noqa: B007, only the last is wanted
            pass
        if last is None or not pattern.groups:
            return float(last is not None)
        return float((last.group(1) or "").strip() == answer.strip())

    return score


class Worker:
    def __init__(self, setup: Setup, scorers: dict[str, Scorer], connection: socket.socket) -> None:
        self._setup, self._scorers, self._connection = setup, scorers, connection
        self._foreign = any(map(_needs_the_machine, setup.scorers))
        # What a program may have is kept from it by its own walls; it must only not be less than they allow.
        self._memory_mb = max(setup.memory_mb, setup.sandbox.memory_mb if "code" in setup.scorers else 0)

    def judge(self, ask: Ask) -> Verdict:
        start_s = time.monotonic()
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._connection.close()
            self._live(ask, writing, parent)
        os.close(writing)
        said = _read(reading, start_s + _KILL_SHARE * self._setup.timeout_s)
        os.close(reading)
        status, peak_mb = _end(pid)
        return msgspec.structs.replace(
            self._verdict(said, status, len(ask.items)), seconds=time.monotonic() - start_s, peak_mb=peak_mb
        )

    def _verdict(self, said: bytes | None, status: int, count: int) -> Verdict:
        if said is None:
            return Verdict("timeout", reason=f"took longer than {self._setup.timeout_s:g} s")
        with suppress(msgspec.MsgspecError):
            verdict = decode_verdict(said)
            if verdict.status != "ok" or len(verdict.rewards) == count:
                return verdict
        return Verdict("error", reason=f"its process ended without a verdict ({_describe(status)})")

    def _live(self, ask: Ask, writing: int, parent: int) -> None:
        """The child's whole life."""
        try:
            os.setpgid(0, 0)
            die_with_parent(parent)
            limit(self._memory_mb, self._setup.timeout_s, on_top=self._foreign)
            verdict = _score_all(ask, self._scorers)
            said = encode(verdict)
            os.write(writing, _LENGTH.pack(len(said)) + said)
        finally:
            os._exit(0)


def _score_all(ask: Ask, scorers: dict[str, Scorer]) -> Verdict:
    try:
        rewards = _rewards(ask.items, scorers)
    except MemoryError:
        return Verdict("error", reason="scorer failed: it used up its memory")
    # A scorer may be the user's own: its failure is not a wrong answer.
    except (Exception, SystemExit, Refused) as error:
        said = " ".join(str(error).split())[:_MAX_REASON]
        printable = "".join(char if char.isprintable() else "?" for char in said)
        return Verdict("error", reason=f"scorer failed: {type(error).__name__}: {printable}")
    bad = [reward for reward in rewards if not math.isfinite(reward)]
    return Verdict("error", reason=f"scorer gave {bad[0]}") if bad else Verdict("ok", rewards)


def _rewards(items: tuple[Item, ...], scorers: dict[str, Scorer]) -> tuple[float, ...]:
    """The user's own functions and programs first: they may need files, a network, processes, which our own scorers give up
    before they begin."""
    foreign = {
        index: _score(scorers[item.scorer], item) for index, item in enumerate(items) if _needs_the_machine(item.scorer)
    }
    seal()
    return tuple(
        foreign[index] if index in foreign else _score(scorers[item.scorer], item) for index, item in enumerate(items)
    )


def _needs_the_machine(scorer: str) -> bool:
    return is_reference(scorer) or scorer == "code"


def _score(scorer: Scorer, item: Item) -> float:
    reward = scorer(unpack_text(item.completion), unpack_text(item.answer), unpack_text(item.prompt))
    if inspect.isawaitable(reward):
        reward = asyncio.run(_awaited(reward))
    return float(reward)


async def _awaited(value: Any) -> Any:
    return await value


def _read(reading: int, deadline_s: float) -> bytes | None:
    """The child's one message, or what there is of it when the child ends; None when it is late."""
    said, poll = b"", select.poll()
    poll.register(reading, select.POLLIN)
    while len(said) < _LENGTH.size or len(said) < _LENGTH.size + _LENGTH.unpack_from(said)[0]:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            return None
        data = os.read(reading, _MAX_VERDICT_BYTES)
        if not data:
            break
        said += data
    return said[_LENGTH.size :]


def _end(pid: int) -> tuple[int, float]:
    """Make sure that nothing of the child, or of what it may have started, is left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    _end_strays()
    return status, usage.ru_maxrss / 1024


def _end_strays() -> None:
    """What the child had started and left its group has become ours, since orphans are adopted here."""
    with suppress(ChildProcessError):
        while True:
            for stray in _children():
                with suppress(ProcessLookupError):
                    os.kill(stray, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
    return []


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _prepare(setup: Setup) -> dict[str, Scorer] | NotReady:
    try:
        scorers = load_scorers(setup)
    except re.error as error:
        return NotReady(f"reward.pattern: {error}")
    except LlamaRLError as error:
        return NotReady(str(error))
    except (Exception, SystemExit) as error:  # importing a user's file may fail in any way
        return NotReady(f"{error}" if isinstance(error, ImportError) else f"{type(error).__name__}: {error}")
    gc.collect()
    gc.freeze()
    gc.disable()  # in a child that lives for one answer it would only touch every page
    return scorers


def main() -> None:
    fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those above
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=fd)
    inbox = Inbox(connection)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        setup = decode_setup(inbox.wait())
        scorers = _prepare(setup)
        if isinstance(scorers, NotReady):
            send(connection, scorers)
            return
        send(connection, Ready())
        worker = Worker(setup, scorers, connection)
        while True:
            send(connection, worker.judge(decode_ask(inbox.wait())))


if __name__ == "__main__":
    main()
