"""metrics.jsonl: one row per update and training role, ordered by update and then by role.

A training role may die and repeat its updates. Its rows are then removed and written again, so that the file has each update
once, and two runs with the same results have the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from llamarl.io.append_file import AppendFile
from llamarl.observe.rows import cut_rows

Metrics = Mapping[str, float]


class MetricsFile:
    """Writes metrics.jsonl. Rows of an update wait until all `roles` have made it; `next_update` is the first to write."""

    def __init__(self, path: Path, roles: Sequence[str], next_update: int = 0) -> None:
        cut_rows(path, lambda row: row.get("update", next_update) < next_update)
        self._path, self._roles, self._next = path, tuple(roles), next_update
        self._file = AppendFile(path)
        self._waiting: dict[int, dict[str, Metrics]] = {}

    def add(self, update: int, role: str, metrics: Metrics) -> None:
        self._waiting.setdefault(update, {})[role] = metrics
        while len(rows := self._waiting.get(self._next, {})) == len(self._roles):
            for name in self._roles:
                self._file.append_json({"update": self._next, "role": name, **rows[name]})
            del self._waiting[self._next]
            self._next += 1

    def rewind(self, update: int, role: str) -> None:
        """Remove the role's rows from this update on, since it repeats them. The rows of other roles stay."""
        if update < self._next:
            self._file.close()
            for row in cut_rows(self._path, lambda row: row.get("update", update) < update):
                self._waiting.setdefault(row.pop("update"), {})[row.pop("role")] = row
            self._file, self._next = AppendFile(self._path), update
        for waiting in self._waiting.values():
            waiting.pop(role, None)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()
