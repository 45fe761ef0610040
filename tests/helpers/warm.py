"""Runs `llamarl ARGS` in a process forked from one that has imported torch: as in a fresh interpreter, but without its
seconds of imports."""

from __future__ import annotations

import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from llamarl.engine.forking import (
    MAX_MESSAGE,
    READY,
    ForkServerLoop,
    control_from_arguments,
    import_for_children,
    start_fork_process,
)

_LOOK_S = 0.005


class Order(Struct, frozen=True):
    args: tuple[str, ...]
    environment: dict[str, str]
    segment_bytes: int  # 0: the program's default


class Started(Struct, frozen=True, tag=True):
    pid: int


class Ended(Struct, frozen=True, tag=True):
    pid: int
    code: int


_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_news = msgspec.msgpack.Decoder(Started | Ended).decode


class WarmForkServer:
    """The tests' end of the connection. It must be made in the main thread: its process dies with the thread that made it."""

    def __init__(self) -> None:
        assert threading.current_thread() is threading.main_thread()
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        self._control, self._process = start_fork_process("helpers.warm", environment={"PYTHONPATH": path})
        assert self._control.recv(MAX_MESSAGE) == READY
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}

    def start(self, order: Order) -> int:
        with self._lock:
            self._control.send(_encode(order))
            while (pid := self._hear()) is None:
                pass
        return pid

    def code_of(self, pid: int) -> int | None:
        with self._lock:
            while select.select([self._control], [], [], 0)[0]:
                self._hear()
            return self._ended.get(pid)

    def _hear(self) -> int | None:
        """Receive one message; returns the pid if a process has started."""
        news = _decode_news(self._control.recv(MAX_MESSAGE))
        if isinstance(news, Started):
            return news.pid
        self._ended[news.pid] = news.code
        return None


fork_server = functools.cache(WarmForkServer)


class WarmProcess:
    """The part of `subprocess.Popen` that tests need."""

    def __init__(self, args: Sequence[str], environment: Mapping[str, str], segment_bytes: int = 0) -> None:
        self.pid = fork_server().start(Order(tuple(args), dict(environment), segment_bytes))

    def poll(self) -> int | None:
        return fork_server().code_of(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = time.monotonic() + (3600.0 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError
            time.sleep(_LOOK_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class _Warm(ForkServerLoop):
    def on_order(self, data: bytes, fds: list[int]) -> None:
        order = _decode_order(data)
        self.send(_encode(Started(self.fork(lambda: _live(order)))))

    def on_exit(self, pid: int, status: int) -> None:
        self.send(_encode(Ended(pid, os.waitstatus_to_exitcode(status))))


def _live(order: Order) -> None:
    from llamarl import cli, failpoints
    from llamarl.controller import ledger_file
    from llamarl.io import record_log

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.environment)
    failpoints._armed = failpoints._from_environment()
    record_log.MAX_SEGMENT_BYTES = order.segment_bytes or record_log.MAX_SEGMENT_BYTES
    ledger_file.FOLD_BYTES = order.segment_bytes or ledger_file.FOLD_BYTES
    sys.argv = ["llamarl", *order.args]
    cli.main()


if __name__ == "__main__":
    control = control_from_arguments()
    import_for_children()

    import llamarl.jobs.job  # noqa: F401

    _Warm(control).run()
