"""The worker of a host: Monarch's own worker loop, with a fork server beside it that forks all processes there.

An engine without named hosts runs it as a program: `python -m llamarl.engine.monarch.worker URL PARENT READY FD...`, with
descriptors that all processes there inherit. For a host of a cluster: `llamarl worker`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarl.engine.forking import READY, start_fork_process
from llamarl.engine.monarch import stub
from llamarl.engine.monarch.fork_server import FORK_SERVER
from llamarl.engine.monarch.join_client import JoinClient, leaving_on_signals
from llamarl.errors import InputError, JobFailed
from llamarl.processes import die_with_parent

PYTHON, STUB = "LLAMARL_PYTHON", "LLAMARL_STUB"
# Monarch numbers the messages to each actor, also to a worker. A worker that was started again at the same address would wait
# for ever for the messages that its predecessor got. So workers take messages as they come; all other actors keep the order.
IN_ORDER = "HYPERACTOR_ENABLE_DEST_ACTOR_REORDERING_BUFFER"
_FORK_SERVER_S = 120.0  # for importing torch, however slow the disk
_MAX_FAILED_STARTS = 3
_LISTEN_S = 0.5  # after which a worker that could not listen has said so


class ForkServers:
    """Keeps one fork server alive: when it dies, its children die with it, and another takes over behind the same
    descriptor."""

    def __init__(self, inherited: Sequence[int]) -> None:
        self._inherited = inherited
        control, self._process = self._start()
        self.fd = control.detach()
        os.set_inheritable(self.fd, True)
        if not self._wait_until_ready():
            raise JobFailed("the process that starts executors could not start")
        threading.Thread(target=self._replace, daemon=True).start()

    def _start(self) -> tuple[socket.socket, int]:
        control, process = start_fork_process("llamarl.engine.monarch.fork_server", inherited=self._inherited)
        return control, process.pid

    def _wait_until_ready(self) -> bool:
        """Whether it came up in time; otherwise it is killed."""
        with socket.socket(fileno=os.dup(self.fd)) as control:
            poll = select.poll()
            poll.register(control, select.POLLIN)
            if poll.poll(1000 * _FORK_SERVER_S) and control.recv(len(READY)) == READY:
                return True
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        return False

    def _replace(self) -> None:
        """Replace each fork server that dies, at once: orders wait in the socket of the next one until it has imported torch.
        After several in a row that were never ready, the worker ends."""
        failed_starts = 0
        while failed_starts < _MAX_FAILED_STARTS:
            os.waitpid(self._process, 0)
            try:
                control, self._process = self._start()
            except OSError as error:
                print(f"llamarl worker: {error}", file=sys.stderr, flush=True)
                break
            os.dup2(control.fileno(), self.fd)
            control.close()
            failed_starts = 0 if self._wait_until_ready() else failed_starts + 1
        print("llamarl worker: the process that starts executors could not start", file=sys.stderr, flush=True)
        os._exit(JobFailed.exit_code)


def start_serving(url: str, inherited: Sequence[int] = ()) -> Any:
    """Begin to serve this host; returns a future that ends only with the worker. The calling thread must live on: the fork
    server dies with it."""
    fork_servers = ForkServers(inherited)
    os.environ.update(
        {
            FORK_SERVER: str(fork_servers.fd),
            PYTHON: sys.executable,
            STUB: str(Path(stub.__file__).resolve()),
            IN_ORDER: "false",
        }
    )
    from monarch.actor import start_worker_loop_forever

    return start_worker_loop_forever(address=url, ca="trust_all_connections")  # all that the transport lets through


def serve(url: str, inherited: Sequence[int] = (), ready_fd: int = -1) -> None:
    """Serve this host until killed."""
    loop = start_serving(url, inherited)
    if ready_fd >= 0:
        os.write(ready_fd, READY)
    wait_for(loop)


def serve_joined(url: str, client: JoinClient) -> None:
    """Serve this host to the job that `client` joins, until it leaves."""
    with leaving_on_signals(client):
        wait_for(start_serving(url), _LISTEN_S)
        client.run()


def wait_for(loop: Any, limit_s: float | None = None) -> None:
    """Wait for the end of a worker's loop, for ever or for `limit_s`; InputError if it could not listen."""
    try:
        loop.get(timeout=limit_s)
    except TimeoutError:
        pass  # it serves
    except ValueError as error:
        raise InputError(f"worker: {error}") from None


def main() -> None:
    url, parent, ready_fd, *inherited = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine alone decides what Ctrl-C means
    serve(url, [int(fd) for fd in inherited], int(ready_fd))


if __name__ == "__main__":
    main()
