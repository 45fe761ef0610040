"""Finds a run's processes and their listening sockets in /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

_LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # states in /proc/net; 07: bound, not connected
_ACCEPTS = 0x10000  # flag of a listening socket in /proc/net/unix


def marked_processes(mark: str) -> set[int]:
    """Living processes with NAME=VALUE in their environment, which children inherit."""
    found = set()
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def listeners(pids: set[int]) -> set[str]:
    """`PROTOCOL ADDRESS` of every socket on which the processes accept connections or datagrams."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = set()
    for protocol, state in _LISTENING.items():
        for line in _rows(f"/proc/net/{protocol}"):
            if line[3] == state and line[9] in inodes:
                found.add(f"{protocol} {line[1].partition(':')[0]}")
    for line in _rows("/proc/net/unix"):
        if int(line[3], 16) & _ACCEPTS and line[6] in inodes:
            found.add("unix")
    return found


def _socket_inodes(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _rows(path: str) -> list[list[str]]:
    with suppress(OSError):
        return [line.split() for line in Path(path).read_text().splitlines()[1:]]
    return []


@contextmanager
def watching_listeners(mark: str) -> Iterator[set[str]]:
    """Collect every socket on which this process or a marked one listens inside the `with` block, ten times a second."""
    seen: set[str] = set()
    done = Event()

    def watch() -> None:
        while not done.wait(0.1):
            seen.update(listeners(marked_processes(mark) | {os.getpid()}))

    before = listeners({os.getpid()})
    thread = Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        seen -= before


def wait_until(condition: Callable[[], object], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
