"""How much memory this machine gives us, and whether it has killed somebody for lack of it: /proc and cgroups, v1 and v2."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number of about this size for "none"


class FreeMemory(Struct, frozen=True):
    """Bytes of memory: all that there is, swap included, and what is free at the moment."""

    total_bytes: float
    available_bytes: float


def host_memory(root: Path = _ROOT) -> FreeMemory:
    """What the machine has, or the tightest cgroup of this process allows."""
    found = _numbers(root / "proc/meminfo")
    total = 1024 * (found.get("MemTotal:", _NO_LIMIT) + found.get("SwapTotal:", 0))
    room = FreeMemory(total, 1024 * found.get("MemAvailable:", _NO_LIMIT))
    for folder in _cgroups(root):
        limit = _limit(folder)
        if limit < _NO_LIMIT:
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            kept = _numbers(folder / "memory.stat").get("inactive_file", 0)  # given back when it is needed
            room = FreeMemory(min(room.total_bytes, limit), min(room.available_bytes, limit - used + kept))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v`, for each process
    if limit != resource.RLIM_INFINITY:
        room = FreeMemory(min(room.total_bytes, limit), min(room.available_bytes, limit))
    return room


class KilledForMemory:
    """Counts how often the kernel has killed a process of ours since it was last asked."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._count = self._read()

    def again(self) -> bool:
        before, self._count = self._count, self._read()
        return self._count > before

    def _read(self) -> int:
        """By our cgroups; where these do not tell, by the whole machine."""
        files = [folder / name for folder in _cgroups(self._root) for name in ("memory.events", "memory.oom_control")]
        counts = [found["oom_kill"] for file in files if "oom_kill" in (found := _numbers(file))]
        return max(counts) if counts else _numbers(self._root / "proc/vmstat").get("oom_kill", 0)


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of the cgroups that limit this process's memory, from its own up to the outermost that can be seen."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if kinds else "sys/fs/cgroup")
        below = Path(path.lstrip("/"))
        yield from (top / one for one in (below, *below.parents) if (top / one).is_dir())


def _limit(folder: Path) -> int:
    limits = (_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes"))
    return min((limit for limit in limits if limit is not None), default=_NO_LIMIT)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
