"""The seccomp filter of a program: a list of allowed system calls. All others are refused, including future ones.

There are no sockets but connected pairs (event loops need them), no ptrace, mount, bpf, io_uring, namespaces, keys, or memory
that no limit counts. Without a pid namespace of its own, a program may not start processes or threads, change file modes, or
signal any process but itself. The filter is classic BPF, assembled here: eight bytes per instruction.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from llamarl.tasks.sandbox.syscalls import ARCHITECTURES, call, checked, libc, numbers

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCH, _ARGS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # marks calls of x86_64's x32 ABI

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1

_NEW_NAMESPACES = 0x7E020080
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
_PRCTLS = (15, 16)  # set and get a thread's name
_OWNER_FCNTLS = (
    8,
    10,
    15,
    1024,
    1026,
)  # SETOWN, SETSIG, SETOWN_EX, SETLEASE, NOTIFY: all can cause signals

_NEW_TASKS = ("fork", "vfork", "clone", "setsid", "setpgid")
_SIGNALS = ("kill", "tgkill")
_METADATA = ("chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "futimesat")
_OURS = ("seccomp", "pivot_root", "mount_setattr", "tkill", "clone3")  # called by us, not allowed to programs


class Instruction(NamedTuple):
    code: int
    if_true: int
    if_false: int
    value: int


class Check(NamedTuple):
    """The masked argument must be one of `values`, or with `exclude` none of them. With `wide`, all 64 bits count."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    exclude: bool = False
    wide: bool = False


_CHECKS: Mapping[str, tuple[Check, ...]] = {
    "clone": (Check(0, (0,), mask=_NEW_NAMESPACES),),
    "ioctl": (Check(1, _IOCTLS),),
    "fcntl": (Check(1, _OWNER_FCNTLS, exclude=True),),
    "prctl": (Check(0, _PRCTLS),),
    "prlimit64": (Check(0, (0,)),),  # only its own limits
    "socketpair": (Check(0, (_AF_UNIX,)), Check(1, (_SOCK_STREAM,), mask=_SOCK_TYPE)),
    "sendto": (Check(4, (0,), wide=True),),  # without an address: only to the peer of a pair
}


def allowed_calls(machine: str, *, own_pid: int | None) -> dict[str, tuple[Check, ...]]:
    """Maps each allowed call to the checks of its arguments. With `own_pid`, the program has no pid namespace: it may start
    no process and signal only itself."""
    ours = {*_OURS, *(name for name in numbers(machine) if name.startswith("landlock_"))}
    names = [name for name in numbers(machine) if name not in ours]
    if own_pid is None:
        return {name: _CHECKS.get(name, ()) for name in names}
    alone = {name: _CHECKS.get(name, ()) for name in names if name not in (*_NEW_TASKS, *_METADATA)}
    return alone | {name: (Check(0, (own_pid,)),) for name in _SIGNALS}


@cache
def assemble(machine: str, *, own_pid: int | None = None) -> bytes:
    call_numbers = numbers(machine)
    program = [
        Instruction(_LOAD, 0, 0, _ARCH),
        Instruction(_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine].audit),
        Instruction(_RETURN, 0, 0, _KILL),
        Instruction(_LOAD, 0, 0, _NUMBER),
        Instruction(_JUMP_AT_LEAST, 0, 1, _X32),
        Instruction(_RETURN, 0, 0, _KILL),
        # On ENOSYS, glibc falls back to clone, whose flags a filter can read.
        *_block(call_numbers["clone3"], [Instruction(_RETURN, 0, 0, _ERRNO | _ENOSYS)]),
    ]
    for name, checks in allowed_calls(machine, own_pid=own_pid).items():
        program += _block(call_numbers[name], _judge(checks))
    program.append(Instruction(_RETURN, 0, 0, _ERRNO | _EPERM))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _block(number: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Run `body`, which returns, for this call number; other calls skip it."""
    return [Instruction(_JUMP_EQUAL, 0, len(body), number), *body]


def _judge(checks: Iterable[Check]) -> list[Instruction]:
    """Allow the call if every check holds. Built backwards, since jumps are relative."""
    body = [Instruction(_RETURN, 0, 0, _ALLOW)]
    for check in reversed(tuple(checks)):
        body = _check(check) + body
    return body


def _check(check: Check) -> list[Instruction]:
    """Fall through if the check holds, else return EPERM."""
    low = _ARGS + 8 * check.argument
    refuse = Instruction(_RETURN, 0, 0, _ERRNO | _EPERM)
    out: list[Instruction] = []
    if check.wide:
        out += [Instruction(_LOAD, 0, 0, low + 4), Instruction(_JUMP_EQUAL, 1, 0, 0), refuse]
    out += [Instruction(_LOAD, 0, 0, low), Instruction(_AND, 0, 0, check.mask)]
    count = len(check.values)
    for index, value in enumerate(check.values):
        left = count - 1 - index  # comparisons between this one and the refusal
        if check.exclude:
            out.append(Instruction(_JUMP_EQUAL, left, 1 if not left else 0, value))
        else:
            out.append(Instruction(_JUMP_EQUAL, left + 1, 0, value))
    return [*out, refuse]


def give_up_privileges() -> None:
    """Set no_new_privs: no program started from here gains privileges. Unprivileged users need it to install a filter."""
    checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(no_new_privs)")


def install(program: bytes) -> None:
    """Install the filter for this process and all its future programs; it cannot be removed."""
    kept = ctypes.create_string_buffer(program, len(program))
    pointer = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(kept)), 16)
    call("seccomp", _SET_MODE_FILTER, 0, pointer)


def is_known() -> bool:
    """Whether the kernel supports filters: without one it then complains about the address (EFAULT), not the call."""
    try:
        call("seccomp", _SET_MODE_FILTER, 0, None)
    except OSError as error:
        return error.errno == 14  # EFAULT
    return True
