"""Keeps NVIDIA's MPS daemon running until its standard input ends, then removes everything of it. Standard library only.

Run as a program: `python -m llamarl.engine.local.mps_process`. It prints the folder where clients find the daemon, and then a
line more: `up` as soon as they do, or nothing if it did not start. Its standard input is a pipe from the job, which ends when
the job does, also when it is killed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from llamarl.processes import adopt_orphans, die_with_parent

PROGRAM = "nvidia-cuda-mps-control"
PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
UP = "up"
CONTROL = "control"  # the socket in the daemon's folder by which clients find it
_LONGEST = 80  # bytes of the temporary folder's path, since that of a socket has at most 107
_START_S, _END_S, _LOOK_S = 20.0, 4.0, 0.2


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    adopt_orphans()
    long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST
    folder = Path(tempfile.mkdtemp(prefix="llamarl-mps-", dir="/tmp" if long else None))
    try:
        print(folder, flush=True)
        daemon = subprocess.Popen(
            [PROGRAM, "-f"],
            env={**os.environ, PIPES: str(folder), _LOGS: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here; its server ends with it
        )
        try:
            print(UP if _is_up(daemon, folder) else "", flush=True)
            while daemon.poll() is None and not _job_ended(_LOOK_S):
                pass
        finally:
            _end(daemon)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_up(daemon: subprocess.Popen[bytes], folder: Path) -> bool:
    deadline_s = time.monotonic() + _START_S
    while daemon.poll() is None and time.monotonic() < deadline_s:
        if (folder / CONTROL).exists():
            return True
        if _job_ended(_LOOK_S / 10):
            break
    return False


def _job_ended(within_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], within_s)[0])


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(_END_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    _wait_for_servers()


def _wait_for_servers() -> None:
    """They end a moment after the daemon that started them; then another one can serve the GPU."""
    deadline_s = time.monotonic() + _END_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline_s:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(_LOOK_S / 10)


if __name__ == "__main__":
    main()
