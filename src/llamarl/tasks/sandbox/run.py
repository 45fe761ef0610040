"""Runs one program once: starts it behind its walls, feeds it, reads its output and ends it.

The caller forks, so it must have no threads. Our own processes report over a pipe that the program never holds, each line
with the run's nonce. Without the line that says that the walls stand, the program's output is ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from llamarl.config import SandboxConfig
from llamarl.errors import LlamaRLError
from llamarl.processes import die_with_parent
from llamarl.tasks.sandbox.interpreter import CALL, RUN, Interpreter
from llamarl.tasks.sandbox.walls import Walls, enclose, enter_namespaces

_READ_BYTES = 1 << 16
_MOVED = 100  # descriptors are moved above this number before they get their final numbers
_STATUS = 5  # descriptor of the status pipe in the child, until it executes the program
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_GRACE_S = 2.0  # time for killed processes to end


class SandboxError(LlamaRLError):
    """The walls could not be put up, so nothing was run. The program is not to blame."""


class Ran(NamedTuple):
    """How a program ended, and its output."""

    how: Literal["ended", "timeout", "flooded"]
    status: int  # as returned by `os.wait`
    stdout: bytes
    stderr: bytes
    results: list[Any] | None = None  # returned by the calls, if any were made

    @property
    def succeeded(self) -> bool:
        return self.how == "ended" and self.status == 0


class Sandbox:
    """Runs programs behind one kind of walls, with one interpreter and one set of limits."""

    def __init__(self, walls: Walls, interpreter: Interpreter, limits: SandboxConfig) -> None:
        self.walls, self._interpreter, self._limits = walls, interpreter, limits

    def run(self, source: str, stdin: str = "") -> Ran:
        """Run the program as a script with this input."""
        run = _Run(self.walls, self._interpreter, self._limits, RUN)
        return run.go(_bytes(source), _bytes(stdin))

    def call(self, source: str, calls: Sequence[Mapping[str, Any]]) -> Ran:
        """Import the program as a module and call its functions. Each call has `call` (the name), `args` and `kwargs`."""
        run = _Run(self.walls, self._interpreter, self._limits, CALL)
        asked = json.dumps({"source": source, "calls": list(calls), "nonce": run.nonce})
        return run.go(asked.encode(), b"")


class _Run:
    def __init__(self, walls: Walls, interpreter: Interpreter, limits: SandboxConfig, script: str) -> None:
        self._walls, self._interpreter, self._limits, self._script = walls, interpreter, limits, script
        self.nonce = secrets.token_hex(16)
        self._stopped: Literal["timeout", "flooded"] | None = None

    def go(self, program: bytes, stdin: bytes) -> Ran:
        pipes = [os.pipe() for _ in range(4)]  # stdout, stderr, results, status
        files = [_sealed(stdin), _sealed(program)]
        reading, writing = ([pipe[side] for pipe in pipes] for side in (0, 1))
        parent = os.getpid()
        reaper = os.fork()
        if reaper == 0:
            self._reap([files[0], writing[0], writing[1], files[1], writing[2]], writing[3], parent)
        for fd in (*writing, *files):
            os.close(fd)
        try:
            output = self._collect(reading, reaper)
        finally:
            for fd in reading:
                os.close(fd)
            os.waitpid(reaper, 0)
        return self._outcome(*output)

    # In the caller's process

    def _collect(self, fds: Sequence[int], reaper: int) -> list[bytes]:
        """Read until all other ends are closed; the reaper closes its own last. Stops the run at its limits."""
        output = {fd: bytearray() for fd in fds}
        poll, left = select.poll(), set(fds)
        for fd in fds:
            poll.register(fd, select.POLLIN)
        deadline_s = time.monotonic() + self._limits.wall_s
        while left and (ready := poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000)):
            left -= {fd for fd, _ in ready if not self._read_once(output[fd], fd, poll)}
            if max(map(len, output.values())) > self._limits.output_kb << 10:
                break
        if left:
            self._stopped = "timeout" if time.monotonic() >= deadline_s else "flooded"
            os.kill(reaper, signal.SIGTERM)
            self._drain(output[fds[-1]], fds[-1], reaper)
        return [bytes(output[fd]) for fd in fds]

    @staticmethod
    def _read_once(output: bytearray, fd: int, poll: select.poll) -> bool:
        """Read once. Returns False at the end of the stream."""
        data = os.read(fd, _READ_BYTES)
        output += data
        if not data:
            poll.unregister(fd)
        return bool(data)

    @staticmethod
    def _drain(output: bytearray, status: int, reaper: int) -> None:
        """Read the reaper's last lines while it ends the program and then itself. A reaper that is late is killed."""
        poll, deadline_s = select.poll(), time.monotonic() + _GRACE_S
        poll.register(status, select.POLLIN)
        while poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            data = os.read(status, _READ_BYTES)
            output += data
            if not data:
                return
        os.kill(reaper, signal.SIGKILL)

    def _outcome(self, stdout: bytes, stderr: bytes, results: bytes, status: bytes) -> Ran:
        reports = self._reports(status)
        if "walled" not in reports:
            raise SandboxError(f"sandbox: {reports.get('failed') or 'its process ended before its walls stood'}")
        code = int(reports.get("ended") or -1)
        return Ran(self._stopped or "ended", code, stdout, stderr, self._results(results))

    def _reports(self, status: bytes) -> dict[str, str]:
        """Return what our own processes reported about this run."""
        lines = [line.split(" ", 2) for line in status.decode(errors="replace").splitlines()]
        return {word: rest for nonce, word, rest in (line for line in lines if len(line) == 3) if nonce == self.nonce}

    def _results(self, output: bytes) -> list[Any] | None:
        """Return the results if they are complete, written once, and of this run."""
        if not output.startswith(self.nonce.encode()):
            return None
        try:
            results = json.loads(output[len(self.nonce) :], parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return None
        return results if isinstance(results, list) else None

    # In the reaper, which stays outside of the program's namespaces and sees when all processes in there are gone

    def _reap(self, fds: Sequence[int], status: int, parent: int) -> NoReturn:
        try:
            enter_namespaces(self._walls)
            die_with_parent(parent)
            # SIGTERM is taken only before the child is reaped, since its pid may be reused afterwards.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            pid = os.fork()
            if pid == 0:
                self._exec_program(fds, status)
            for fd in fds:
                os.close(fd)
            signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, signal.SIGKILL))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            self._report(status, "ended", str(os.waitpid(pid, 0)[1]))
        except BaseException as error:
            self._report(status, "failed", _line(error))
        finally:
            os._exit(0)

    def _exec_program(self, fds: Sequence[int], status: int) -> NoReturn:
        try:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            _renumber([*fds, status])
            os.set_inheritable(_STATUS, False)
            enclose(self._walls, self._interpreter, self._limits)
            self._report(_STATUS, "walled", "in")
            command = [*self._interpreter.command, "-c", self._script]
            os.execve(self._interpreter.executable, command, _ENVIRONMENT)
        except BaseException as error:
            self._report(_STATUS, "failed", _line(error))
        finally:
            os._exit(1)

    def _report(self, fd: int, word: str, rest: str) -> None:
        os.write(fd, f"{self.nonce} {word} {rest}\n".encode())


_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",  # each thread of an array library reserves more memory than a program may have
    "OPENBLAS_NUM_THREADS": "1",
}


def _renumber(fds: Sequence[int]) -> None:
    """Renumber these descriptors to 0, 1, 2, ... and close all others."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _MOVED) for fd in fds]
    for place, fd in enumerate(moved):
        os.dup2(fd, place)
    os.closerange(len(fds), os.sysconf("SC_OPEN_MAX"))


def _sealed(data: bytes) -> int:
    """Return a memfd with this content that can no longer be changed."""
    fd = os.memfd_create("input", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
