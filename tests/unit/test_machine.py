"""Memory is what the tightest of machine and cgroups gives, whichever version of cgroups there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.machine import FreeMemory, KilledForMemory, host_memory

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\nSwapTotal: {8 << 20} kB\n")
    write(tmp_path, "proc/self/cgroup", "")
    write(tmp_path, "proc/vmstat", "nr_free_pages 12\noom_kill 2\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_without_limits_it_is_all_the_machine_has(root: Path) -> None:
    assert host_memory(root) == FreeMemory(72 * GIB, 48 * GIB)


def test_a_cgroup_v2_limits_also_from_further_up(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pod/box\n")
    write(root, "sys/fs/cgroup/pod/box/memory.max", "max\n")
    write(root, "sys/fs/cgroup/pod/memory.max", f"{16 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.current", f"{10 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.stat", f"anon 5\ninactive_file {4 * GIB}\n")
    assert host_memory(root) == FreeMemory(16 * GIB, 10 * GIB)


def test_a_cgroup_v1_limits_and_a_huge_number_is_none(root: Path) -> None:
    write(root, "proc/self/cgroup", "9:name=systemd:/\n4:memory:/box\n1:cpu:/\n0::/\n")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert host_memory(root) == FreeMemory(8 * GIB, 6 * GIB)


def test_a_machine_that_tells_nothing_limits_nothing(tmp_path: Path) -> None:
    assert host_memory(tmp_path).total_bytes > 1e18
    assert not KilledForMemory(tmp_path).again()


def test_kills_for_memory_are_counted_by_cgroup_or_else_by_the_machine(root: Path) -> None:
    by_machine = KilledForMemory(root)
    assert not by_machine.again()
    write(root, "proc/vmstat", "oom_kill 3\n")
    assert by_machine.again()
    assert not by_machine.again()
    write(root, "proc/self/cgroup", "4:memory:/box\n")
    write(root, "sys/fs/cgroup/memory/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    by_cgroup = KilledForMemory(root)
    write(root, "proc/vmstat", "oom_kill 4\n")
    assert not by_cgroup.again(), "somebody else's"
    write(root, "sys/fs/cgroup/memory/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert by_cgroup.again()
