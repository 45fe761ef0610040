"""Restricts a process that judges one answer. Applied in the child, after everything that it needs is loaded."""

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
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before `seal`, which would refuse it

# Audit events that computing may raise. `_refuse` checks the arguments of `open`, `compile` and `exec`.
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
        "sys.setprofile",  # counts calls, see work_limit.py
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


refusals: list[str] = []  # what this process was refused, also where a library's bare `except` went on
_sealed: list[bool] = []  # not empty once this process is sealed


class Refused(BaseException):
    """The process tried something forbidden. A BaseException, so that no library's `except Exception` swallows it."""


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can end them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def limit(memory_mb: int, timeout_s: float, *, on_top: bool) -> None:
    """Set the kernel's limits. With `on_top`, the memory limit is added to what the process already uses; 0: no limit."""
    held = _address_space() if on_top else 0
    if memory_mb:
        _set(resource.RLIMIT_AS, held + memory_mb * 2**20)
    _set(resource.RLIMIT_CPU, int(timeout_s) + 2)  # a second safeguard; the worker watches the wall clock
    _set(resource.RLIMIT_CORE, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def seal(*, parses: bool = False) -> None:
    """Allow this process only to compute and import, for scorers that read formulas. It can no longer run code from outside
    installed files, nor write, connect, start or signal anything. With `parses`, it may still parse text, which executes
    nothing. The first call is for good; others change nothing."""
    if _sealed:
        return
    _sealed.append(True)
    _set(resource.RLIMIT_FSIZE, 0)
    _set(resource.RLIMIT_NPROC, 0)
    sys.addaudithook(_refuse_but_parse if parses else _refuse)


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
    refusals.append(event)
    raise Refused(f"tried to {event}")


def _refuse_but_parse(event: str, args: tuple[Any, ...]) -> None:
    if event != "compile":
        _refuse(event, args)
