"""A pool of workers of constant size. A worker that dies or hangs is replaced at once; its request counts as failed."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from llamarl.errors import ConfigError, JobFailed
from llamarl.processes import PYTHON
from llamarl.tasks.custom_scorers import Signature
from llamarl.tasks.workers.protocol import Inbox, NotReady, Ready, Setup, Verdict, WorkRequest, decode_reply, send

# Workers kill late children themselves. A worker that takes this many times the limit, plus the grace time, hangs.
_PATIENCE = 5
_GRACE_S = 3.0
_START_S = 120.0
_SEND_S = 30.0
_LEAVE_S = 1.0
_MAX_FAILED_STARTS = 3
Finished = tuple[int, Verdict]


class WorkerHandle:
    """The pool's side of one worker process."""

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        command = [*PYTHON, "-m", "llamarl.tasks.workers.worker", str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            process_group=0,
        )
        theirs.close()
        ours.settimeout(_SEND_S)
        self.connection, self.inbox = ours, Inbox(ours)
        self.up = False
        self.ticket: int | None = None
        self.deadline_s = time.monotonic() + _START_S
        send(ours, setup)

    @property
    def free(self) -> bool:
        return self.up and self.ticket is None

    def assign(self, ticket: int, request: WorkRequest, timeout_s: float) -> None:
        self.ticket, self.deadline_s = ticket, time.monotonic() + _PATIENCE * timeout_s + _GRACE_S
        send(self.connection, request)

    def end(self) -> None:
        """Ask the worker to end itself and all that its answers have started; kill it if it is late."""
        self.connection.close()
        self.process.terminate()
        try:
            self.process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()


def _end_all(workers: list[WorkerHandle]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.end()
    workers.clear()


class WorkerPool:
    """Distributes requests over workers and collects their verdicts."""

    def __init__(self, setup: Setup, count: int) -> None:
        self._setup = setup
        self._workers: list[WorkerHandle] = []
        weakref.finalize(self, _end_all, self._workers)
        self._queue: deque[tuple[int, WorkRequest]] = deque()
        self._failed: list[Finished] = []
        self._failed_starts = 0
        self.signatures: dict[str, Signature] = {}  # of the user's own scorers; known once a worker is up
        self.has_tools = False  # whether an environment shows tools to the model; known once a worker is up
        self._workers.extend(WorkerHandle(setup) for _ in range(count))

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.process.pid for worker in self._workers)

    @property
    def num_pending(self) -> int:
        return len(self._queue) + len(self._failed) + sum(worker.ticket is not None for worker in self._workers)

    def wait_until_up(self) -> None:
        """Wait for all workers. Raises ConfigError if the scorers cannot be loaded."""
        while not all(worker.up for worker in self._workers):
            self._poll(1.0)

    def submit(self, ticket: int, request: WorkRequest) -> None:
        """Queue a request. Whatever happens, `collect` returns one verdict under this ticket."""
        self._queue.append((ticket, request))
        self._dispatch()

    def collect(self, wait_s: float) -> list[Finished]:
        """Return finished verdicts, after waiting at most `wait_s` for one."""
        self._dispatch()
        finished = self._poll(0.0 if self._failed else wait_s)
        self._dispatch()
        failed, self._failed = self._failed, []
        return failed + finished

    def close(self) -> None:
        _end_all(self._workers)

    def _dispatch(self) -> None:
        for worker in list(self._workers):
            if self._queue and worker.free:
                ticket, request = self._queue.popleft()
                try:
                    worker.assign(ticket, request, self._setup.timeout_s)
                except OSError as error:
                    self._replace(worker, Verdict("error", reason=f"its worker could not be reached: {error}"))

    def _poll(self, wait_s: float) -> list[Finished]:
        poll = select.poll()
        by_fd = {worker.connection.fileno(): worker for worker in self._workers}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        soonest_s = min((w.deadline_s for w in self._workers if not w.free), default=time.monotonic() + wait_s)
        patience_s = max(0.0, min(wait_s, soonest_s - time.monotonic()))
        finished: list[Finished] = []
        for fd, _ in poll.poll(patience_s * 1000):
            finished += self._receive(by_fd[fd])
        self._replace_late()
        return finished

    def _receive(self, worker: WorkerHandle) -> Sequence[Finished]:
        try:
            message = worker.inbox.receive()
            reply = decode_reply(message) if message is not None else None
        except (EOFError, OSError, msgspec.MsgspecError):
            self._replace(worker, Verdict("error", reason="its worker died"))
            return ()
        match reply:
            case Ready():
                worker.up, self._failed_starts = True, 0
                self.signatures, self.has_tools = reply.signatures, reply.has_tools
            case NotReady():
                raise ConfigError(reply.reason)
            case Verdict() if worker.ticket is not None:
                ticket, worker.ticket = worker.ticket, None
                return [(ticket, reply)]
        return ()

    def _replace_late(self) -> None:
        now_s = time.monotonic()
        for worker in list(self._workers):
            if not worker.free and worker.deadline_s < now_s:
                self._replace(worker, Verdict("timeout", reason="its worker did not answer and was replaced"))

    def _replace(self, worker: WorkerHandle, verdict: Verdict) -> None:
        if worker.ticket is not None:
            self._failed.append((worker.ticket, verdict))
        worker.end()
        if not worker.up:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise JobFailed(f"a scorer's worker did not come up {self._failed_starts} times in a row")
        self._workers[self._workers.index(worker)] = WorkerHandle(self._setup)
