"""Memory of this machine and out-of-memory kills, read from /proc and from cgroups v1 and v2."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

_ROOT = Path("/")
GIB = 1 << 30
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number of about this size for "no limit"


class FreeMemory(Struct, frozen=True):
    """Bytes of memory: the total, including swap, and what is available now."""

    total_bytes: float
    available_bytes: float


def host_memory(root: Path = _ROOT) -> FreeMemory:
    """Memory of the machine, or less if a cgroup or rlimit of this process allows less."""
    found = _numbers(root / "proc/meminfo")
    total = 1024 * (found.get("MemTotal:", _NO_LIMIT) + found.get("SwapTotal:", 0))
    room = FreeMemory(total, 1024 * found.get("MemAvailable:", _NO_LIMIT))
    for folder in _cgroups(root):
        limit = _limit(folder)
        if limit < _NO_LIMIT:
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            kept = _numbers(folder / "memory.stat").get("inactive_file", 0)  # page cache, freed on demand
            room = FreeMemory(min(room.total_bytes, limit), min(room.available_bytes, limit - used + kept))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v`, per process
    if limit != resource.RLIM_INFINITY:
        room = FreeMemory(min(room.total_bytes, limit), min(room.available_bytes, limit))
    return room


class MemoryPeak(Struct, frozen=True, array_like=True):
    """The most memory that a process has held, in bytes, and the most that was taken of its GPU by all who compute on it."""

    host: int = 0  # resident, with what it shares with other processes
    device: int = 0  # of the GPU, by PyTorch in this process; 0 without a GPU
    gpu_used: int = 0  # of the GPU, by all processes, whenever this one looked
    gpu_total: int = 0

    def merged(self, other: MemoryPeak) -> MemoryPeak:
        """The larger of both, each by itself; of their GPUs the fuller one."""
        gpu = max(self, other, key=lambda peak: (peak.gpu_share, peak.gpu_used))
        return MemoryPeak(max(self.host, other.host), max(self.device, other.device), gpu.gpu_used, gpu.gpu_total)

    @property
    def gpu_share(self) -> float:
        return self.gpu_used / self.gpu_total if self.gpu_total else 0.0


class KilledForMemory:
    """Detects that the kernel has killed one of our processes for lack of memory."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._count = self._read()

    def again(self) -> bool:
        """Whether there was such a kill since the last call."""
        before, self._count = self._count, self._read()
        return self._count > before

    def _read(self) -> int:
        """Number of kills in our cgroups; in the whole machine if the cgroups do not count them."""
        files = [folder / name for folder in _cgroups(self._root) for name in ("memory.events", "memory.oom_control")]
        counts = [found["oom_kill"] for file in files if "oom_kill" in (found := _numbers(file))]
        return max(counts) if counts else _numbers(self._root / "proc/vmstat").get("oom_kill", 0)


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of the cgroups that limit this process's memory, from its own to the outermost visible one."""
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
    """Parse lines of a name and a number."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
