"""The walls around a program, put up step by step in the process that becomes the program.

There are three kinds; the first that this machine allows is used. With namespaces, a program has a file system of its own in
memory, with the interpreter and the system's libraries read-only in it. It may start processes, and all end with it. Without
namespaces, Landlock lets it read the same files, and it can write no file and start no process.
"""

from __future__ import annotations

import ctypes
import enum
import math
import os
import resource
import signal
import struct

from llamarl.config import SandboxConfig
from llamarl.tasks.sandbox import landlock, seccomp
from llamarl.tasks.sandbox.interpreter import Interpreter, devices
from llamarl.tasks.sandbox.syscalls import call, checked, libc

UNPRIVILEGED = 65534  # user id of programs when the job runs as root

_NEW_USER, _NEW_PID, _NEW_MOUNTS = 0x10000000, 0x20000000, 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 0x40000, 0x2, 0x4
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY = 0x1 | 0x2  # and nosuid
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_NEW_ROOT = "/proc"  # a mount point that exists everywhere and holds no file that we need
_FOLDER = "/tmp"  # the program's own folder
_MAX_FILES = 1000
_MAX_OPEN = 64
_TOP_LINKS = ("/lib", "/lib64", "/bin", "/sbin")  # links into /usr on most machines


class Walls(enum.Enum):
    """The kinds of walls, strongest first."""

    ROOT = "namespaces made by root, an unprivileged user inside"
    USER = "user, pid and mount namespaces"
    BARE = "no namespaces: no new processes, no files"

    @property
    def has_namespaces(self) -> bool:
        return self is not Walls.BARE


def walls_to_try() -> tuple[Walls, ...]:
    """Return the kinds of walls that this user may be able to put up, strongest first."""
    return tuple(Walls) if os.geteuid() == 0 else (Walls.USER, Walls.BARE)


def enter_namespaces(walls: Walls) -> None:
    """Called in the reaper: enter the namespaces in which its child, the program, will start."""
    if walls is Walls.ROOT:
        _unshare(_NEW_MOUNTS | _NEW_PID)
        return
    become_unprivileged()
    if walls is Walls.USER:
        uid, gid = os.geteuid(), os.getegid()
        _unshare(_NEW_USER | _NEW_MOUNTS | _NEW_PID)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")


def become_unprivileged() -> None:
    """If this process runs as root, switch to an unprivileged user without groups."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
        os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise root owns its files in /proc


def enclose(walls: Walls, interpreter: Interpreter, limits: SandboxConfig) -> None:
    """Called in the child: put up all walls. Afterwards it can only execute the program."""
    if walls.has_namespaces:
        _enter_own_root(interpreter, limits)
    if walls is Walls.ROOT:
        become_unprivileged()
        _unshare(_NEW_USER)  # so that RLIMIT_NPROC counts its processes apart from others of that user
    os.chdir(_FOLDER if walls.has_namespaces else "/")
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    seccomp.give_up_privileges()
    ruleset = landlock.prepare(_rules(walls, interpreter))
    own_pid = None if walls.has_namespaces else os.getpid()
    program = seccomp.assemble(os.uname().machine, own_pid=own_pid)
    landlock.restrict(ruleset)
    _limit(walls, limits)
    seccomp.install(program)


def _rules(walls: Walls, interpreter: Interpreter) -> list[tuple[str, int]]:
    rules = [(path, landlock.READ) for path in interpreter.roots]
    rules += [(path, landlock.OWN) for path in devices()]
    return [*rules, (_FOLDER, landlock.OWN)] if walls.has_namespaces else rules


def _limit(walls: Walls, limits: SandboxConfig) -> None:
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: math.ceil(limits.cpu_s),
        resource.RLIMIT_FSIZE: limits.file_mb << 20,
        resource.RLIMIT_NOFILE: _MAX_OPEN,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_AS: limits.memory_mb << 20,
    }
    if walls.has_namespaces:
        bounds[resource.RLIMIT_NPROC] = limits.processes
    for which, bound in bounds.items():
        hard = resource.getrlimit(which)[1]
        value = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(which, (value, value))


def _enter_own_root(interpreter: Interpreter, limits: SandboxConfig) -> None:
    """Make a file system in memory the root. It has a total size limit and ends with the namespace."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    options = f"size={max(limits.file_mb, 1)}m,nr_inodes={_MAX_FILES},mode=755"
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in (*interpreter.roots, *devices()):
        _bind(path, read_only=path in interpreter.roots)
    for link in _TOP_LINKS:
        if os.path.islink(link):
            os.symlink(os.readlink(link), _NEW_ROOT + link)
    os.makedirs(_NEW_ROOT + _FOLDER, exist_ok=True)
    os.chmod(_NEW_ROOT + _FOLDER, 0o777)
    os.chdir(_NEW_ROOT)
    call("pivot_root", b".", b".")
    checked(libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def _bind(path: str, *, read_only: bool) -> None:
    """Bind `path` to the same path in the new root."""
    target = _NEW_ROOT + path
    if os.path.isdir(path):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT, 0o644))
    _mount(path, target, None, _MS_BIND | _MS_REC)
    if read_only:
        attributes = ctypes.create_string_buffer(struct.pack("<QQQQ", _READ_ONLY, 0, 0, 0), 32)
        call("mount_setattr", _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, 32)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    result = libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    checked(result, f"mount {target}")


def _unshare(flags: int) -> None:
    checked(libc.unshare(flags), "unshare")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
