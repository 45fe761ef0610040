"""What a process that judges one answer may do: little. Applied in the child, after everything it needs is loaded."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import sysconfig
from types import CodeType
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)  # before any hook: loading it later would be refused

# Events of Python's audit that computing may raise; `open`, `compile` and `exec` are looked at more closely.
_HARMLESS = frozenset(
    {
        "import",
        "marshal.loads",
        "os.listdir",
        "os.scandir",
        "object.__getattr__",
        "object.__setattr__",
        "object.__delattr__",
        "sys._getframe",
        "sys._current_frames",
        "sys.setprofile",  # counts calls, see work.py
        "sys.excepthook",
        "sys.unraisablehook",
        "builtins.id",
        "code.__new__",
        "function.__new__",
        "gc.get_objects",
        "gc.get_referrers",
        "gc.get_referents",
        "array.__new__",
        "time.sleep",
    }
)


class Refused(BaseException):
    """Not an Exception: no library's `except Exception` may swallow it."""


def adopt_orphans() -> None:
    """Processes whose parent has ended become children of this one, and can be ended by it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def limit(memory_mb: int, timeout_s: float, *, on_top: bool) -> None:
    """The kernel's limits. `on_top`: memory is counted from what the process holds already."""
    held = _address_space() if on_top else 0
    _set(resource.RLIMIT_AS, held + memory_mb * 2**20)
    _set(resource.RLIMIT_CPU, int(timeout_s) + 2)  # the wall clock is watched from outside; this is a second line
    _set(resource.RLIMIT_CORE, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def seal() -> None:
    """For our own symbolic scorer: from here on this process can compute and import, and nothing else. It cannot run
    code that is not in an installed file, nor write, connect, start or signal anything."""
    _set(resource.RLIMIT_FSIZE, 0)
    _set(resource.RLIMIT_NPROC, 0)
    sys.addaudithook(_refuse)


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _set(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def _installed_roots() -> tuple[str, ...]:
    paths = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return tuple(os.path.realpath(path) + os.sep for path in {*paths, own} if path)


_ROOTS = _installed_roots()


def _is_installed(path: Any) -> bool:
    return isinstance(path, str) and os.path.realpath(path).startswith(_ROOTS)


def _is_library_code(code: Any) -> bool:
    if not isinstance(code, CodeType):
        return False
    return code.co_filename.startswith("<frozen ") or _is_installed(code.co_filename)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event in _HARMLESS or event.startswith("cpython."):
        return
    if event == "exec" and _is_library_code(args[0]):
        return
    if event == "compile" and _is_installed(args[1]):
        return
    if event == "open" and _is_installed(args[0]) and args[1] in ("r", "rb"):
        return
    raise Refused(f"tried to {event}")
