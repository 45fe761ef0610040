"""The lock on a run folder: one owner at a time.

It is a kernel lock (flock) on a file in the folder. It ends with the process that holds it; a frozen process still holds it.
On NFS the server keeps such locks. On a file system without locks, the user gets a warning.

The holder may also lose the lock without noticing: somebody removes the file, or a server forgets a client that was away. So
the holder writes a mark into the file and checks it before each update becomes final.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from llamarl.errors import InputError, JobFailed

LOCK = "lock"
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class Owner(Struct, frozen=True):
    """The process that holds a run folder."""

    host: str
    pid: int
    mark: str = ""


class RunLock:
    """The lock on a run folder, held from construction to `release`. Raises InputError if another process holds it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self.warning = ""  # text for the user if the file system has no locks
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _take(self._fd)
        except BlockingIOError:
            owner = os.pread(self._fd, 4096, 0)
            os.close(self._fd)
            raise _at_work(folder, owner) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(self._fd)
                raise
            self.warning = f"{folder}: this file system has no locks; take care that no second job works in this folder"
        self._owner = Owner(socket.gethostname(), os.getpid(), secrets.token_hex(8))
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, msgspec.json.encode(self._owner), 0)

    def check(self) -> None:
        """Raise JobFailed if another process has taken over the folder."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise JobFailed(f"{self._path} is gone, so another job may be at work there; this one stops") from None
        try:
            content = os.pread(fd, 4096, 0)
        finally:
            os.close(fd)
        if content != msgspec.json.encode(self._owner):
            raise JobFailed(f"{_owner_in(content)} has taken over {self._path.parent}; this job stops")

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _take(fd: int) -> None:
    """Lock at once. A reader that asks `is_locked` is in the way for a moment only, so it is tried again."""
    for wait_s in (0.01, 0.05, 0.2, 0.0):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not wait_s:
                raise
            time.sleep(wait_s)


def refuse_locked(folder: Path) -> None:
    """InputError if a job is at work in a folder."""
    if is_locked(folder):
        raise _at_work(folder, (folder / LOCK).read_bytes())


def is_locked(folder: Path) -> bool:
    """Whether a job is at work in a run folder, on any host that shares its locks."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(fd)
    return False


def _at_work(folder: Path, content: bytes) -> InputError:
    """The refusal of a folder whose lock has this content."""
    owner = _owner_in(content)
    return InputError(f"--run {folder}: {owner} is at work there; wait for it, end it, or name a new folder")


def is_lock(path: Path) -> bool:
    """Whether a file is the lock of a run folder, and not somebody else's file of that name."""
    content = path.read_bytes()
    return not content or _owner(content) is not None


def _owner_in(content: bytes) -> str:
    owner = _owner(content)
    return f"process {owner.pid} on {owner.host}" if owner else "another process"


def _owner(content: bytes) -> Owner | None:
    try:
        return msgspec.json.decode(content, type=Owner)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
