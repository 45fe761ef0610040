"""Landlock: the kernel limits which files a process may touch. It needs no privileges."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from llamarl.tasks.sandbox.syscalls import call

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_DEVICES_AND_SOCKETS = 1 << 6 | 1 << 9 | 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file rights, by ABI version
_NETWORK = 1 << 0 | 1 << 1  # bind and connect, since ABI 4
_SCOPES = 1 << 0 | 1 << 1  # abstract sockets and signals, since ABI 6
_CREATE_VERSION, _PATH_BENEATH = 1, 1

READ = _EXECUTE | _READ_FILE | _READ_DIR
OWN = ~(_EXECUTE | _MAKE_DEVICES_AND_SOCKETS | _IOCTL_DEV)  # for a folder that the program may write in


def version() -> int:
    """Return the ABI version of the kernel's Landlock, or 0 without Landlock."""
    try:
        return call("landlock_create_ruleset", None, 0, _CREATE_VERSION)
    except OSError:
        return 0


def prepare(rules: Iterable[tuple[str, int]]) -> int:
    """Return the descriptor of a ruleset that allows only these rights, each at its path and below."""
    abi = version()
    handled = (1 << _NUM_RIGHTS.get(abi, 16)) - 1
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    attributes = struct.pack("<QQQ", handled, _NETWORK, _SCOPES)[:size]
    ruleset = call("landlock_create_ruleset", ctypes.create_string_buffer(attributes, size), size, 0)
    for path, rights in rules:
        _allow(ruleset, path, rights & handled)
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("<Qi", rights, fd)
        call("landlock_add_rule", ruleset, _PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0)
    finally:
        os.close(fd)


def restrict(ruleset: int) -> None:
    """Apply the ruleset to this process and its future children, irrevocably."""
    call("landlock_restrict_self", ruleset, 0)
