"""The filter, read instruction by instruction as the kernel would, on both architectures."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from llamarl.tasks.sandbox.seccomp import assemble
from llamarl.tasks.sandbox.syscalls import ARCHITECTURES, numbers

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
MACHINES = list(ARCHITECTURES)
OWN_PID = 4242
# Not in our table, since no program may use them: x86_64, aarch64.
FORBIDDEN = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "sendmsg": (46, 211),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "userfaultfd": (323, 282),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "pidfd_getfd": (438, 438),
    "init_module": (175, 105),
    "kexec_load": (246, 104),
    "setuid": (105, 146),
    "personality": (135, 92),
    "seccomp": (317, 277),
}


def verdict(machine: str, number: int, args: tuple[int, ...] = (), *, own_pid: int | None = None, arch: int = 0) -> int:
    """What the kernel would do with this call."""
    seen = struct.pack("<IIQ6Q", number, arch or ARCHITECTURES[machine].audit, 0, *(*args, 0, 0, 0, 0, 0, 0)[:6])
    program = list(struct.iter_unpack("<HBBI", assemble(machine, own_pid=own_pid)))
    assert len(program) <= 4096
    at = held = 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        if code == 0x20:
            (held,) = struct.unpack_from("<I", seen, value)
        elif code == 0x54:
            held &= value
        elif code == 0x06:
            return int(value)
        else:
            assert code in (0x15, 0x35)
            at += if_true if (held == value if code == 0x15 else held >= value) else if_false


def asked(machine: str, name: str, *args: int, own_pid: int | None = None) -> int:
    return verdict(machine, numbers(machine)[name], args, own_pid=own_pid)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_forbidden_is_refused(machine: str, name: str) -> None:
    number = FORBIDDEN[name][ARCHITECTURES[machine].column]
    for own_pid in (None, OWN_PID):
        assert verdict(machine, number, own_pid=own_pid) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_no_allowed_call_is_a_forbidden_one_by_number(machine: str) -> None:
    column = ARCHITECTURES[machine].column
    ours = {"seccomp", "pivot_root"}
    assert not {numbers[column] for name, numbers in FORBIDDEN.items() if name not in ours} & set(
        numbers(machine).values()
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_other_architectures_end_the_program(machine: str) -> None:
    other = next(name for name in MACHINES if name != machine)
    assert verdict(machine, 0, arch=ARCHITECTURES[other].audit) == KILL
    assert verdict(machine, 0, arch=0x40000003) == KILL, "32-bit x86, whose numbers mean other calls"
    assert verdict(machine, 0x40000000 | numbers(machine)["read"]) == KILL, "x32"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_program_computes_reads_and_writes(machine: str) -> None:
    for name in ("read", "write", "openat", "mmap", "futex", "getrandom", "execve", "exit_group", "epoll_pwait"):
        assert asked(machine, name) == ALLOW
        assert asked(machine, name, own_pid=OWN_PID) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_new_processes_only_with_a_namespace_to_end_them_by(machine: str) -> None:
    assert asked(machine, "clone", 0x1200011) == ALLOW
    assert asked(machine, "clone", 0x1200011, own_pid=OWN_PID) == EPERM
    assert asked(machine, "clone", 0x3D0F00, own_pid=OWN_PID) == EPERM, "a thread"
    assert asked(machine, "clone3") == ENOSYS, "its flags lie in memory, where no filter can read them"
    for flag in (0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x02000000, 0x04000000, 0x08000000):
        assert asked(machine, "clone", flag | 17) == EPERM, "a namespace"


@pytest.mark.parametrize("machine", MACHINES)
def test_without_a_namespace_it_signals_itself_alone(machine: str) -> None:
    for name in ("kill", "tgkill"):
        assert asked(machine, name, OWN_PID, 9, own_pid=OWN_PID) == ALLOW
        for pid in (1, OWN_PID - 1, 0, 2**32 - 1, 2**64 - 1):
            assert asked(machine, name, pid, 9, own_pid=OWN_PID) == EPERM
    for name in ("fchmod", "fchmodat", "utimensat", "setsid"):
        assert asked(machine, name, own_pid=OWN_PID) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_that_reach_further_are_refused(machine: str) -> None:
    assert asked(machine, "socketpair", 1, 1 | 0o2000000 | 0o4000) == ALLOW
    assert asked(machine, "socketpair", 1, 2) == EPERM, "datagrams, which can be sent anywhere"
    assert asked(machine, "socketpair", 2, 1) == EPERM
    assert asked(machine, "sendto", 3, 4096, 1, 0, 0) == ALLOW
    assert asked(machine, "sendto", 3, 4096, 1, 0, 4096) == EPERM
    assert asked(machine, "sendto", 3, 4096, 1, 0, 1 << 40) == EPERM, "an address above 4 GiB"
    assert asked(machine, "prlimit64", 0, 7) == ALLOW
    assert asked(machine, "prlimit64", OWN_PID, 7) == EPERM
    assert asked(machine, "prctl", 15) == ALLOW
    assert asked(machine, "prctl", 1) == EPERM
    assert asked(machine, "ioctl", 0, 0x5401) == ALLOW
    assert asked(machine, "ioctl", 0, 0x5412) == EPERM, "typing into the terminal"
    assert asked(machine, "fcntl", 3, 2) == ALLOW
    for command in (8, 10, 15, 1024, 1026):
        assert asked(machine, "fcntl", 3, command) == EPERM


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_the_kernels(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("no kernel headers")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    known: dict[str, int] = {}
    for name, number in found:
        known.setdefault("newfstatat" if name == "fstatat" else name, int(number))
    ours = {name: number for name, number in numbers(machine).items() if name in known}
    assert len(ours) > 0.95 * len(numbers(machine))
    assert ours == {name: known[name] for name in ours}
    forbidden = {name: number[ARCHITECTURES[machine].column] for name, number in FORBIDDEN.items() if name in known}
    assert forbidden == {name: known[name] for name in forbidden}
