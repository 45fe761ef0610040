"""The environment server of a job: a process in another virtual environment, watched and started again by a thread.

Nobody waits for it: while it is down, `is_up` says so, and what happened is told by `take_notes`.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from llamarl.config import DatasetConfig
from llamarl.errors import ConfigError
from llamarl.tasks.verifiers.host import MARK
from llamarl.tasks.verifiers.program import host_command, host_variables, last_line

_START_S = 300.0  # importing verifiers and what the environment loads take long
_LEAVE_S = 5.0
_MAX_FAILED_STARTS = 3
_PATIENCE_S = 60.0  # without any sign of life
_NO_FIELDS = msgspec.msgpack.encode({})


class EnvironmentServer:
    """Handle of the server. It ends with this object, and is started again at the same address when it dies or hangs."""

    def __init__(self, settings: DatasetConfig, timeout_s: float) -> None:
        """`timeout_s` is the time limit of an episode; a server that is silent for a quarter of it hangs."""
        self._supervisor = _Supervisor(settings, min(_PATIENCE_S, timeout_s / 4))
        self._end = weakref.finalize(self, self._supervisor.stop)
        threading.Thread(target=self._supervisor.run, name="environment-server", daemon=True).start()

    def wait_until_up(self) -> str:
        """Wait for the server; returns its address. Raises ConfigError if it does not start."""
        self._supervisor.decided.wait()
        if self.failure:
            raise ConfigError(self.failure)
        return self._supervisor.address

    @property
    def is_up(self) -> bool:
        return self._supervisor.up

    @property
    def failure(self) -> str:
        """Why the server is not started again any more; empty while it runs or starts."""
        return self._supervisor.failure

    def take_notes(self) -> list[str]:
        """Why it was started again, once for each time since the last call."""
        notes: list[str] = []
        with suppress(queue.Empty):
            while True:
                notes.append(self._supervisor.notes.get_nowait())
        return notes

    @property
    def pid(self) -> int:
        process = self._supervisor.process
        return process.pid if process else 0

    def close(self) -> None:
        self._end()


class _Supervisor:
    """What the thread knows. It holds no reference to the handle, whose end is the end of the server."""

    def __init__(self, settings: DatasetConfig, patience_s: float) -> None:
        self._settings, self._patience_s = settings, patience_s
        self._lock, self._stopped = threading.Lock(), False
        self.address = "tcp://127.0.0.1:0"
        self.process: _ServerProcess | None = None
        self.up, self.failure = False, ""
        self.decided = threading.Event()  # the first start has succeeded or failed
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # a thread that ends silently would leave the job waiting
            self.failure = f"task.env: the server of {self._settings.env} is not watched any more: {error}"
        finally:
            self.up = False
            self.decided.set()
            if self.process:
                self.process.end()

    def _run(self) -> None:
        failed_starts = 0
        while process := self._launch():
            address = process.wait_for_address()
            if not address:
                process.end()
                failed_starts += 1
                if not self.decided.is_set() or failed_starts == _MAX_FAILED_STARTS:
                    self.failure = f"task.env: the server of {self._settings.env} does not start: {process.complaint}"
                    return
                continue
            failed_starts, self.address, self.up = 0, address, True
            self.decided.set()
            reason = self._watch(process)
            self.up = False
            process.end()
            if not self._stopped:
                self.notes.put(f"the environment server {reason}; it is started again")

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        if self.process:
            self.process.end()

    def _launch(self) -> _ServerProcess | None:
        with self._lock:
            if self._stopped:
                return None
            self.process = _ServerProcess(self._settings, self.address)
            return self.process

    def _watch(self, process: _ServerProcess) -> str:
        """Ask for signs of life until there are none. Returns what is wrong."""
        import zmq

        alive = os.pidfd_open(process.pid)
        context = zmq.Context()
        try:
            socket = context.socket(zmq.DEALER)
            socket.connect(self.address)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(alive, zmq.POLLIN)
            return self._listen(process, socket, alive, poller)
        finally:
            context.destroy(linger=0)
            os.close(alive)

    def _listen(self, process: _ServerProcess, socket: Any, alive: int, poller: Any) -> str:
        heard_s = time.monotonic()
        while (now_s := time.monotonic()) - heard_s < self._patience_s:
            socket.send_multipart([uuid.uuid4().hex.encode(), b"health", _NO_FIELDS])
            ask_again_s = now_s + self._patience_s / 4
            while (left_s := ask_again_s - time.monotonic()) > 0:
                ready = dict(poller.poll(1000 * left_s))
                if alive in ready:
                    return f"has died ({process.describe_end()})"
                if socket in ready:
                    socket.recv_multipart()
                    heard_s = time.monotonic()
        return f"said nothing for {self._patience_s:g} s"


class _ServerProcess:
    """One start of the server."""

    def __init__(self, settings: DatasetConfig, address: str) -> None:
        self._process = subprocess.Popen(
            host_command(settings, "serve", address),
            stdin=subprocess.PIPE,  # it ends when this is closed
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=host_variables(settings),
            process_group=0,
        )
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: deque[bytes] = deque(maxlen=20)
        self._readers = [
            self._read(self._process.stdout, self._take_line, then=lambda: self._said.put("")),
            self._read(self._process.stderr, self._errors.append),
        ]

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_address(self) -> str:
        """Where it listens; empty if it has ended or takes too long."""
        with suppress(queue.Empty):
            return self._said.get(timeout=_START_S)
        return ""

    @property
    def complaint(self) -> str:
        """What it said last."""
        for reader in self._readers:
            reader.join(1.0)
        return last_line(b"".join(self._errors))

    def describe_end(self) -> str:
        code = self._process.wait()
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def end(self) -> None:
        """Ask it to end with whatever it has started; kill it if it is late."""
        with suppress(ProcessLookupError, PermissionError):
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _take_line(self, line: bytes) -> None:
        if (text := line.decode(errors="replace")).startswith(MARK):
            self._said.put(text.removeprefix(MARK).strip())

    def _read(
        self, stream: Any, take: Callable[[bytes], None], then: Callable[[], None] = lambda: None
    ) -> threading.Thread:
        """Read a stream to its end, so that the process never waits."""

        def read() -> None:
            for line in stream:
                take(line)
            then()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread
