"""An index of the rollouts of a run: a small database beside the run folder, which grows with it.

It holds numbers only and says where each group lies in the store; text is read from there. It can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from llamarl.io.record_log import read_record, read_segment, segment_files
from llamarl.observe.starts import STARTS
from llamarl.types import RolloutGroup, facts_of
from llamarl.view.tails import SegmentTail

_decode = msgspec.msgpack.Decoder(RolloutGroup).decode
_FORMAT = "1"
_BATCH = 256  # groups that are written to the database at once
_PAUSE_S = 0.002  # between batches, so that requests are answered meanwhile
_TABLES = """
CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS groups(ordinal INTEGER PRIMARY KEY, segment INTEGER, offset INTEGER);
CREATE TABLE IF NOT EXISTS rollouts(
    ordinal INTEGER, sample INTEGER, reward REAL, tokens INTEGER, version INTEGER, last_version INTEGER, cut INTEGER,
    turns INTEGER, flat INTEGER, problem INTEGER, task INTEGER, PRIMARY KEY(ordinal, sample)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_problem ON rollouts(problem);
"""
SORTS = {"ordinal": "ordinal", "reward": "reward", "tokens": "tokens", "version": "version"}


class RolloutIndex:
    """The rollouts in `folder`, a record log of scored groups. `task_of` says which part of a mixture a group belongs to."""

    def __init__(self, run: Path, folder: Path, task_of: Callable[[int], int]) -> None:
        self._task_of = task_of
        self._folder, self._identity = folder, f"{_FORMAT} {_first_start(run)}"
        self._path = _index_path(run)
        self._write_lock, self._local = threading.Lock(), threading.local()
        self.num_bytes = self.done_bytes = 0  # size of the store, and how much of it is indexed
        self._open()

    def _open(self) -> None:
        db = self._db
        db.executescript(_TABLES)
        if self._fact("identity") != self._identity:
            db.executescript("DELETE FROM facts; DELETE FROM groups; DELETE FROM rollouts;")
            self._set_facts(identity=self._identity)
            db.commit()
        place = (self._fact("place") or "-1 0").split()
        self._tail = SegmentTail(self._folder, (int(place[0]), int(place[1])))

    @property
    def _db(self) -> sqlite3.Connection:
        """This thread's connection."""
        found: sqlite3.Connection | None = getattr(self._local, "db", None)
        if found is None:
            try:
                found = sqlite3.connect(self._path, timeout=10.0)
                found.execute("PRAGMA journal_mode=WAL")
                found.execute("PRAGMA synchronous=OFF")  # it can be made again
            except sqlite3.DatabaseError:
                self._path.unlink(missing_ok=True)
                found = sqlite3.connect(self._path, timeout=10.0)
            self._local.db = found
        return found

    def _fact(self, name: str) -> str:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else ""

    def _set_facts(self, **facts: str) -> None:
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES(?, ?)", facts.items())

    # Building

    def grow(self, stop: threading.Event | None = None) -> bool:
        """Index what is new. Returns whether there was anything. Only one thread does it at a time."""
        with self._write_lock:
            self._drop_removed()
            self._measure()
            found = False
            batch: list[tuple[int, int, RolloutGroup]] = []
            for segment, offset, data in self._tail.read():
                try:
                    batch.append((segment, offset, _decode(data)))
                except msgspec.MsgspecError:
                    continue
                if len(batch) >= _BATCH:
                    self._write(batch)
                    batch, found = [], True
                    self._measure()
                    if stop is not None and stop.wait(_PAUSE_S):
                        return True
            if batch:
                self._write(batch)
            self._measure()
            return found or bool(batch)

    def _write(self, batch: Sequence[tuple[int, int, RolloutGroup]]) -> None:
        db = self._db
        db.executemany(
            "INSERT OR REPLACE INTO groups VALUES(?, ?, ?)", [(group.ordinal, seg, at) for seg, at, group in batch]
        )
        rows = [row for _, _, group in batch for row in _rows(group, self._task_of(group.ordinal))]
        db.executemany("INSERT OR REPLACE INTO rollouts VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self._set_facts(place=f"{self._tail.place[0]} {self._tail.place[1]}")
        db.commit()

    def _drop_removed(self) -> None:
        """Forget the groups of segments that are no longer there."""
        there = {int(path.name) for path in segment_files(self._folder)}
        known = {row[0] for row in self._db.execute("SELECT DISTINCT segment FROM groups")}
        for segment in known - there:
            self._db.execute(
                "DELETE FROM rollouts WHERE ordinal IN (SELECT ordinal FROM groups WHERE segment = ?)", (segment,)
            )
            self._db.execute("DELETE FROM groups WHERE segment = ?", (segment,))
        self._db.commit()

    def _measure(self) -> None:
        number, byte = self._tail.place
        sizes = {int(path.name): path.stat().st_size for path in segment_files(self._folder)}
        self.num_bytes = sum(sizes.values())
        self.done_bytes = sum(size for segment, size in sizes.items() if segment < number)
        self.done_bytes += min(byte, sizes.get(number, 0))

    @property
    def progress(self) -> float:
        """Share of the store that is indexed."""
        return self.done_bytes / self.num_bytes if self.num_bytes else 1.0

    # Questions

    def count(self) -> int:
        """Number of groups in the index."""
        return int(self._db.execute("SELECT COUNT(*) FROM groups").fetchone()[0])

    def select(
        self, where: str, values: Sequence[Any], order: str, limit: int, offset: int = 0
    ) -> list[tuple[Any, ...]]:
        """Rows of the table. `where` and `order` are made by our own code; what users typed is in `values`."""
        text = f"SELECT * FROM rollouts WHERE {where or '1'} ORDER BY {order} LIMIT ? OFFSET ?"
        return self._db.execute(text, (*values, limit, offset)).fetchall()

    def count_up_to(self, where: str, values: Sequence[Any], limit: int) -> int:
        """Number of rows that match, or `limit` if there are more."""
        text = f"SELECT COUNT(*) FROM (SELECT 1 FROM rollouts WHERE {where or '1'} LIMIT ?)"
        return int(self._db.execute(text, (*values, limit)).fetchone()[0])

    def problems(self, limit: int) -> list[int]:
        """The problems that were asked last."""
        text = "SELECT problem FROM rollouts WHERE sample = 0 ORDER BY ordinal DESC LIMIT ?"
        return [row[0] for row in self._db.execute(text, (limit,))]

    def asked(self, problem: int) -> list[int]:
        """The groups that answered a problem, newest first."""
        text = "SELECT DISTINCT ordinal FROM rollouts WHERE problem = ? ORDER BY ordinal DESC LIMIT 50"
        return [row[0] for row in self._db.execute(text, (problem,))]

    def histogram(self, where: str, values: Sequence[Any], column: str, bins: int) -> list[tuple[float, float, int]]:
        """(from, to, count) of a column's values; each value has a bar of its own if they are few."""
        name = SORTS[column]
        few = self._db.execute(
            f"SELECT {name}, COUNT(*) FROM rollouts WHERE {where or '1'} GROUP BY 1 LIMIT ?", (*values, bins + 1)
        ).fetchall()
        if len(few) <= bins:
            return [(value, value, count) for value, count in few]
        low, high = self._db.execute(
            f"SELECT MIN({name}), MAX({name}) FROM rollouts WHERE {where or '1'}", values
        ).fetchone()
        width = (high - low) / bins or 1.0
        text = (
            f"SELECT MIN(CAST(({name} - ?) / ? AS INTEGER), ?), COUNT(*) FROM rollouts WHERE {where or '1'} GROUP BY 1"
        )
        counts = dict(self._db.execute(text, (low, width, bins - 1, *values)).fetchall())
        return [(low + n * width, low + (n + 1) * width, counts.get(n, 0)) for n in range(bins)]

    def group(self, ordinal: int) -> RolloutGroup | None:
        """The group as it is in the store, also one that is not indexed yet."""
        row = self._db.execute("SELECT segment, offset FROM groups WHERE ordinal = ?", (ordinal,)).fetchone()
        if row is not None:
            return _read_group(self._folder / f"{row[0]:08}", row[1], ordinal)
        return self._search(ordinal) if self.progress < 1.0 else None

    def _search(self, ordinal: int) -> RolloutGroup | None:
        """Look where the group must be: segments are nearly in the order of ordinals."""
        firsts = [(first, path) for path in segment_files(self._folder) if (first := _first_ordinal(path)) is not None]
        last = sum(first <= ordinal for first, _ in firsts) - 1
        for number in (last, last - 1, last + 1):
            if 0 <= number < len(firsts):
                for _, _, data in read_segment(firsts[number][1]):
                    if _ordinal(data) == ordinal:
                        return _decode(data)
        return None

    def groups(self, ordinals: Sequence[int]) -> Iterator[RolloutGroup]:
        for ordinal in ordinals:
            if (group := self.group(ordinal)) is not None:
                yield group

    def close(self) -> None:
        if (db := getattr(self._local, "db", None)) is not None:
            db.close()
            self._local.db = None


class _Prompt(msgspec.Struct):
    ordinal: int


class _OnlyOrdinal(msgspec.Struct, tag="rollout"):
    prompt: _Prompt


_decode_ordinal = msgspec.msgpack.Decoder(_OnlyOrdinal).decode


def _ordinal(data: bytes) -> int:
    try:
        return _decode_ordinal(data).prompt.ordinal
    except msgspec.MsgspecError:
        return -1


def _first_ordinal(path: Path) -> int | None:
    for _, _, data in read_segment(path):
        return _ordinal(data)
    return None


def _read_group(path: Path, offset: int, ordinal: int) -> RolloutGroup | None:
    try:
        data = read_record(path, offset)
        group = _decode(data) if data is not None else None
    except (OSError, msgspec.MsgspecError):
        return None
    return group if group is not None and group.ordinal == ordinal else None


def _rows(group: RolloutGroup, task: int) -> Iterator[tuple[Any, ...]]:
    facts, problem = facts_of(group), problem_id(group)
    flat = int(len(set(group.rewards)) == 1)
    for sample, rollout in enumerate(group.rollouts):
        completion = rollout.completion
        versions = [run.version for run in completion.versions]
        yield (
            group.ordinal,
            sample,
            rollout.reward,
            completion.num_tokens,
            min(versions, default=facts.first_version),
            max(versions, default=facts.last_version),
            int(completion.truncated),
            len(completion.given) + 1,
            flat,
            problem,
            task,
        )


def problem_id(group: RolloutGroup) -> int:
    """A number of the problem that is the same in every run."""
    return int.from_bytes(hashlib.blake2b(group.prompt.prompt_tokens, digest_size=6).digest(), "little")


def _first_start(run: Path) -> str:
    try:
        with (run / STARTS).open("rb") as file:
            return hashlib.sha256(file.readline(1 << 20)).hexdigest()[:16]
    except OSError:
        return "unknown"


def _index_path(run: Path) -> Path:
    """Beside the run folder; in the user's cache if that cannot be written; in a temporary folder as the last resort."""
    where = run.resolve()
    digest = hashlib.sha256(str(where).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamarl" / "view"
    for path in (where.parent / f".{where.name}.llamarl-view.db", cache / f"{digest}.db"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                return path
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="llamarl-view-")) / f"{digest}-{int(time.time())}.db"
