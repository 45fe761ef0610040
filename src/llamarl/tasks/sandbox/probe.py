"""Checks by trial whether this machine can run a sandbox. If something is missing, it is named and no program is run."""

from __future__ import annotations

import os

from msgspec import Struct
from msgspec.structs import replace

from llamarl.config import SandboxConfig
from llamarl.errors import ConfigError
from llamarl.tasks.sandbox import landlock, seccomp
from llamarl.tasks.sandbox.interpreter import find_interpreter
from llamarl.tasks.sandbox.run import Sandbox, SandboxError
from llamarl.tasks.sandbox.syscalls import ARCHITECTURES
from llamarl.tasks.sandbox.walls import Walls, walls_to_try

_TRIAL_S = 60.0  # a machine that starts many processes is slow, and no reason to refuse a job
_TRUNCATE_ABI = 3  # first ABI that can forbid truncation, which is needed where a program sees the files of others


class Features(Struct, frozen=True):
    """What this machine's kernel offers for a sandbox."""

    machine: str
    landlock: int  # ABI version; 0 without Landlock
    seccomp: bool


def features() -> Features:
    """Ask the kernel what it offers."""
    machine = os.uname().machine
    known = machine in ARCHITECTURES
    return Features(machine, landlock.version() if known else 0, known and seccomp.is_known())


def missing(found: Features) -> list[str]:
    """Return the missing features that every sandbox needs."""
    if found.machine not in ARCHITECTURES:
        return [f"an architecture whose system calls we know ({', '.join(ARCHITECTURES)}; this is {found.machine})"]
    needs = {
        "Landlock (Linux 5.13 or newer, with landlock among the kernel's security modules)": found.landlock >= 1,
        "seccomp filters": found.seccomp,
    }
    return [need for need, there in needs.items() if not there]


def open_sandbox(limits: SandboxConfig, found: Features | None = None) -> Sandbox:
    """Return the strongest sandbox that works here. Raises ConfigError that names what is missing."""
    found = found or features()
    if lacking := missing(found):
        raise ConfigError(f"sandbox: programs cannot be run safely here; missing: {'; '.join(lacking)}")
    interpreter = find_interpreter(limits.python)
    patient = replace(limits, wall_s=max(_TRIAL_S, limits.wall_s))
    reasons = []
    for walls in walls_to_try():
        if walls is Walls.BARE and found.landlock < _TRUNCATE_ABI:
            reasons.append(f"{walls.value}: Landlock ABI {_TRUNCATE_ABI} (Linux 6.2), there is {found.landlock}")
            continue
        if problem := _problem(Sandbox(walls, interpreter, patient)):
            reasons.append(f"{walls.value}: {problem}")
        else:
            return Sandbox(walls, interpreter, limits)
    raise ConfigError(f"sandbox: programs cannot be run safely here; tried: {'; '.join(reasons)}")


def _problem(sandbox: Sandbox) -> str:
    """Return why the sandbox does not work, or an empty text if it does."""
    try:
        ran = sandbox.run("print(6 * 7)")
    except (SandboxError, OSError) as error:
        return str(error)
    if ran.succeeded and ran.stdout == b"42\n":
        return ""
    said = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"a first program did not run ({ran.how}, status {ran.status}{': ' + said[0] if said else ''})"
