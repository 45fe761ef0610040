"""A simulated disk that fails from the n-th operation on: the machine has died, or the disk is full."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.killing import Killed

CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "chmod", "fsync", "sendfile")
TAKES_ROOM = {"mkdir", "open", "write", "fsync", "sendfile"}


class Disk:
    """Counts the operations that change the disk. From number `fails_at` on, each fails after half of its work."""

    def __init__(self, *, fails_at: int = -1, full: bool = False, only: str = "") -> None:
        self._fails_at, self._full, self._only = fails_at, full, only
        self.operations: list[str] = []
        self.synced: set[int] = set()  # inodes of synced files
        self.on_rename: Callable[[Path, Path], None] = lambda source, target: None

    @property
    def failed(self) -> bool:
        return 0 <= self._fails_at < len(self.operations)

    def operation(self, name: str, where: object, half: Callable[[], object] = lambda: None) -> None:
        """Count an operation before it happens; raises if it is to fail."""
        if (self._full and name not in TAKES_ROOM) or self._only not in str(where):
            return
        self.operations.append(name)
        if self.failed:
            half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if self._full else Killed


class CountedFile(io.FileIO):
    def __init__(self, path: Any, mode: str, disk: Disk) -> None:
        super().__init__(path, mode)
        self._disk = disk

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._disk.operation("write", self.name, lambda: super(CountedFile, self).write(piece[: len(piece) // 2]))
        return super().write(piece)


@contextmanager
def watching(disk: Disk) -> Iterator[Disk]:
    """Route every change of a file through `disk` inside the `with` block, in every thread."""
    real = {name: getattr(os, name) for name in CHANGES}
    real_open = io.open

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+") or isinstance(path, int):
            return real_open(path, mode, *args, **kwargs)
        disk.operation("open", path)
        raw = CountedFile(path, mode.replace("b", "").replace("t", ""), disk)
        if 0 in (*args[:1], kwargs.get("buffering")):
            return raw
        return io.BufferedWriter(raw) if "b" in mode else io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")

    def changing(name: str) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            disk.operation(name, _where(args[0]))
            if name == "fsync":
                disk.synced.add(os.fstat(args[0]).st_ino)
            if name == "rename":
                disk.on_rename(Path(args[0]), Path(args[1]))
            return real[name](*args, **kwargs)

        return change

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        for name in CHANGES:
            patch.setattr(os, name, changing(name))
        yield disk


def _where(target: object) -> str:
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
