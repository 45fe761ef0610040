"""Small machines: limits on memory, open files and disk for a command. What needs root is skipped without it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of this size."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def small_memory(megabytes: int) -> Iterator[Sequence[str]]:
    """Words to put before a command, which then gets at most so much memory."""
    first, second = _CGROUPS / "memory", _CGROUPS
    top, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (second, "memory.max")
    group = top / f"llamarl-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs root, to make a cgroup")
    try:
        (group / limit).write_text(str(megabytes << 20))
        yield ["bash", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "bash"]
    except FileNotFoundError:
        pytest.skip("needs a cgroup that can limit memory")
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a cgroup once the last of its processes is gone."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)
    raise AssertionError(f"processes are left: {(group / 'cgroup.procs').read_text().split()}")


def few_files(count: int) -> Sequence[str]:
    """Words to put before a command, which then can open so many files."""
    return ["bash", "-c", f'ulimit -n {count} && exec "$@"', "bash"]
