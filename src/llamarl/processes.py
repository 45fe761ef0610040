"""How a Python child process is started, and how it dies with its parent. Standard library only."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# `-P` keeps the working folder out of the module path, where a user's `numbers.py` would hide Python's own.
PYTHON = (sys.executable, "-P")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)  # loaded now: a confined process may not load it later


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, however that happens."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the kernel was asked


def adopt_orphans() -> None:
    """Become the parent of all that descend from this process, once their own parents have ended: it can wait for them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Have `top` and `ps -o comm` show this name, of at most 15 bytes."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="utf-8")


@contextmanager
def imports_undisturbed() -> Iterator[None]:
    """For imports of many modules: what they make stays, so that looking for garbage meanwhile only takes time, about an
    eighth of theirs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def describe_signal(number: int) -> str:
    """`killed by SIGKILL`, also for signals without a name."""
    names = {known.value: known.name for known in signal.Signals}
    return f"killed by {names.get(number, f'signal {number}')}"


def describe_status(status: int) -> str:
    """How a process ended, from its wait status."""
    if os.WIFSIGNALED(status):
        return describe_signal(os.WTERMSIG(status))
    return f"exited with code {os.WEXITSTATUS(status)}"
