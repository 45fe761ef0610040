"""A table of a run's kept rollouts: a small database beside the run folder, which grows with it.

It holds numbers only and says where each group lies; text is read from there. It can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from llamarl.algo.advantages import estimate_advantages, why_left_out
from llamarl.config import Config
from llamarl.io.record_log import segment_files
from llamarl.observe.rollout_log import DamagedGroup, SavedGroup, SavedRewind, SavedUpdate, read_group
from llamarl.observe.starts import STARTS
from llamarl.types import PromptGroup, Rollout, RolloutGroup, completions_of
from llamarl.view.tails import SegmentTail

TRAINED, LEFT_OUT, DROPPED = range(3)  # what became of a rollout
STATUSES = ("trained", "left out", "dropped")
SORTS = {"ordinal": "ordinal", "reward": "reward", "tokens": "tokens"}
_FORMAT = "3"
_COMMIT_S = 0.5  # time between commits
_PAUSE_S = 0.001  # after each update, so that requests are answered meanwhile
_decode_row = msgspec.msgpack.Decoder(SavedUpdate | SavedRewind).decode
_TABLES = """
CREATE TABLE facts(name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE updates(number INTEGER PRIMARY KEY, num_groups INTEGER, kept INTEGER);
CREATE TABLE groups(ordinal INTEGER PRIMARY KEY, number INTEGER, segment INTEGER, offset INTEGER);
CREATE TABLE rollouts(
    ordinal INTEGER, sample INTEGER, number INTEGER, reward REAL, tokens INTEGER, version INTEGER, last_version INTEGER,
    status INTEGER, cut INTEGER, turns INTEGER, flat INTEGER, problem INTEGER, task INTEGER,
    PRIMARY KEY(ordinal, sample)) WITHOUT ROWID;
CREATE INDEX by_number ON rollouts(number);
CREATE INDEX by_reward ON rollouts(reward);
CREATE INDEX by_tokens ON rollouts(tokens);
CREATE INDEX by_problem ON rollouts(problem);
CREATE INDEX groups_by_number ON groups(number);
"""
Row = tuple[Any, ...]


class RolloutTable:
    """The rollouts below `folder`, as `observe/rollout_log.py` writes them. `task_of` maps a group to its task."""

    def __init__(self, run: Path, folder: Path, config: Config, task_of: Callable[[int], int]) -> None:
        self._folder, self._config, self._task_of = folder, config, task_of
        self._identity = f"{_FORMAT} {_first_start(run)}"
        self._path = _table_path(run)
        self._write_lock, self._local = threading.Lock(), threading.local()
        self._committed_s = 0.0
        self._num_bytes = self._done_bytes = 0  # size of the log of updates, and how much of it is in the table
        self._open()

    def _open(self) -> None:
        try:
            known = self._fact("identity") == self._identity
        except sqlite3.DatabaseError:  # new, or of another format
            known = False
        if not known:
            names = ("facts", "updates", "groups", "rollouts")
            self._db.executescript("".join(f"DROP TABLE IF EXISTS {name};" for name in names) + _TABLES)
            self._set_facts(identity=self._identity)
            self._db.commit()
        place = (self._fact("place") or "-1 0").split()
        self._tail = SegmentTail(self._folder / "index", (int(place[0]), int(place[1])))
        self._measure()

    @property
    def _db(self) -> sqlite3.Connection:
        """This thread's connection. A damaged file is made anew."""
        found: sqlite3.Connection | None = getattr(self._local, "db", None)
        if found is None:
            found = sqlite3.connect(self._path, timeout=10.0)
            try:
                found.execute("PRAGMA journal_mode=WAL")
            except sqlite3.DatabaseError:
                found.close()
                self._path.unlink(missing_ok=True)
                found = sqlite3.connect(self._path, timeout=10.0)
            found.execute("PRAGMA synchronous=OFF")  # it can be made again
            found.execute("PRAGMA cache_size=-32000")  # kB, as the indexes of a large table are built
            self._local.db = found
        return found

    def _fact(self, name: str) -> str:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else ""

    def _set_facts(self, **facts: str) -> None:
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES(?, ?)", facts.items())

    # Building

    def grow(self, stop: threading.Event | None = None) -> bool:
        """Take in what is new. Returns whether there was anything. Only one thread does it at a time."""
        with self._write_lock:
            found = False
            for _, _, data in self._tail.read():
                with suppress(msgspec.MsgspecError):
                    self._take(_decode_row(data))
                found = True
                if time.monotonic() - self._committed_s > _COMMIT_S:
                    self._commit()
                if stop is not None and stop.wait(_PAUSE_S):
                    break
            self._commit()
            return found

    def _take(self, row: SavedUpdate | SavedRewind) -> None:
        db = self._db
        if isinstance(row, SavedRewind):
            for name in ("updates", "groups", "rollouts"):
                db.execute(f"DELETE FROM {name} WHERE number >= ?", (row.to_update,))
            return
        for name in ("groups", "rollouts"):
            db.execute(f"DELETE FROM {name} WHERE number = ?", (row.update,))
        groups = [(place.ordinal, row.update, place.segment, place.offset) for place in row.groups]
        db.executemany("INSERT OR REPLACE INTO groups VALUES(?, ?, ?, ?)", groups)
        db.execute("INSERT OR REPLACE INTO updates VALUES(?, ?, ?)", (row.update, row.num_groups, len(row.groups)))
        for place in row.groups:
            saved = self._read(place.segment, place.offset)
            if saved is not None:
                db.executemany(f"INSERT OR REPLACE INTO rollouts VALUES({','.join('?' * 13)})", self._rows(saved))

    def _commit(self) -> None:
        """Let other threads see what was taken in, and count it as done."""
        self._set_facts(place=f"{self._tail.place[0]} {self._tail.place[1]}")
        self._db.commit()
        self._committed_s = time.monotonic()
        self._measure()

    def _measure(self) -> None:
        number, byte = self._tail.place
        sizes = {int(path.name): path.stat().st_size for path in segment_files(self._folder / "index")}
        self._num_bytes = sum(sizes.values())
        self._done_bytes = sum(size for segment, size in sizes.items() if segment < number)
        self._done_bytes += min(byte, sizes.get(number, 0))

    @property
    def progress(self) -> float:
        """Share of the updates that are in the table, by bytes."""
        return self._done_bytes / self._num_bytes if self._num_bytes else 1.0

    def _rows(self, saved: SavedGroup) -> Iterator[Row]:
        group = saved.group
        prompt = group if isinstance(group, PromptGroup) else group.prompt
        rollouts = group.rollouts if isinstance(group, RolloutGroup) else ()
        advantages = estimate_advantages(group, self._config.algo) if isinstance(group, RolloutGroup) else []
        flat = not any(advantages)
        task, problem = self._task_of(prompt.ordinal), problem_id(prompt)
        for sample, completion in enumerate(completions_of(group)):
            rollout = rollouts[sample] if rollouts else Rollout(completion, 0.0)
            versions = [run.version for run in completion.versions]
            left_out = why_left_out(rollout, flat=flat, algo=self._config.algo, prompt=prompt)
            yield (
                prompt.ordinal,
                sample,
                saved.update,
                rollout.reward if rollouts else None,
                completion.num_tokens,
                min(versions, default=None),
                max(versions, default=None),
                DROPPED if saved.dropped else LEFT_OUT if left_out else TRAINED,
                int(completion.truncated),
                len(completion.given) + 1,
                int(flat),
                problem,
                task,
            )

    # Questions

    def count(self) -> tuple[int, int]:
        """Number of kept groups, and of all groups of the same updates."""
        kept, all_groups = self._db.execute("SELECT SUM(kept), SUM(num_groups) FROM updates").fetchone()
        return kept or 0, all_groups or 0

    def kept_of(self, update: int) -> tuple[int, int]:
        """Number of kept groups of an update, and of all its groups."""
        row = self._db.execute("SELECT kept, num_groups FROM updates WHERE number = ?", (update,)).fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def select(self, where: str, values: Sequence[Any], order: str, limit: int, offset: int = 0) -> Iterator[Row]:
        """Rows of the table, one by one. `where` and `order` are made by our own code; what users typed is in `values`."""
        text = f"SELECT * FROM rollouts WHERE {where or '1'} ORDER BY {order} LIMIT ? OFFSET ?"
        return iter(self._db.execute(text, (*values, limit, offset)))

    def count_up_to(self, where: str, values: Sequence[Any], limit: int) -> int:
        """Number of rows that match, or `limit` if there are more."""
        text = f"SELECT COUNT(*) FROM (SELECT 1 FROM rollouts WHERE {where or '1'} LIMIT ?)"
        return int(self._db.execute(text, (*values, limit)).fetchone()[0])

    def newest_problems(self, limit: int) -> list[int]:
        """The problems that were asked last."""
        text = "SELECT problem FROM rollouts WHERE sample = 0 ORDER BY ordinal DESC LIMIT ?"
        return [row[0] for row in self._db.execute(text, (limit,))]

    def groups_of_problem(self, problem: int) -> list[int]:
        """The groups that answered a problem, newest first."""
        text = "SELECT DISTINCT ordinal FROM rollouts WHERE problem = ? ORDER BY ordinal DESC LIMIT 50"
        return [row[0] for row in self._db.execute(text, (problem,))]

    def histogram(self, where: str, values: Sequence[Any], column: str, bins: int) -> list[tuple[float, float, int]]:
        """(from, to, count) of a column's values; each value has a bar of its own if they are few. Looks at the newest
        rollouts only, if there are very many."""
        name = SORTS[column]
        inside = (
            f"(SELECT {name} AS value FROM rollouts WHERE {where or '1'} AND {name} IS NOT NULL "
            f"ORDER BY ordinal DESC LIMIT {MAX_DRAWN})"
        )
        few = self._db.execute(
            f"SELECT value, COUNT(*) FROM {inside} GROUP BY 1 LIMIT ?", (*values, bins + 1)
        ).fetchall()
        if len(few) <= bins:
            return [(value, value, count) for value, count in few]
        low, high = self._db.execute(f"SELECT MIN(value), MAX(value) FROM {inside}", values).fetchone()
        width = (high - low) / bins
        text = f"SELECT MIN(CAST((value - ?) / ? AS INTEGER), ?), COUNT(*) FROM {inside} GROUP BY 1"
        counts = dict(self._db.execute(text, (low, width, bins - 1, *values)).fetchall())
        return [(low + n * width, low + (n + 1) * width, counts.get(n, 0)) for n in range(bins)]

    def group(self, ordinal: int) -> SavedGroup | None:
        """The group as it was kept, also one that is not in the table yet."""
        row = self._db.execute("SELECT segment, offset FROM groups WHERE ordinal = ?", (ordinal,)).fetchone()
        if row is None and self.progress < 1.0:
            row = self._search(ordinal)
        return self._read(*row) if row is not None else None

    def _search(self, ordinal: int) -> tuple[int, int] | None:
        """Look for the place of a group in the log of updates; the last row that names it counts."""
        schedule, found = self._config.schedule, None
        expected = ordinal // schedule.groups_per_update if schedule.window <= 1 else None
        for _, _, data in SegmentTail(self._folder / "index").read():
            if expected is not None and _number(data) != expected:
                continue
            with suppress(msgspec.MsgspecError):
                row = _decode_row(data)
                places = row.groups if isinstance(row, SavedUpdate) else ()
                found = next(((one.segment, one.offset) for one in places if one.ordinal == ordinal), found)
        return found

    def _read(self, segment: int, offset: int) -> SavedGroup | None:
        try:
            return read_group(self._folder, segment, offset)
        except DamagedGroup:
            return None

    def close(self) -> None:
        if (db := getattr(self._local, "db", None)) is not None:
            db.close()
            self._local.db = None


MAX_DRAWN = 50_000  # rollouts that a histogram counts


class _OnlyNumber(msgspec.Struct, tag="update"):
    update: int


_decode_number = msgspec.msgpack.Decoder(_OnlyNumber).decode


def _number(data: bytes) -> int:
    """The update that a row is about, without decoding the rest; -1 if it is about none."""
    try:
        return _decode_number(data).update
    except msgspec.MsgspecError:
        return -1


def problem_id(prompt: PromptGroup) -> int:
    """A number of the problem that is the same in every run."""
    return int.from_bytes(hashlib.blake2b(prompt.prompt_tokens, digest_size=6).digest(), "little")


def _first_start(run: Path) -> str:
    try:
        with (run / STARTS).open("rb") as file:
            return hashlib.sha256(file.readline(1 << 20)).hexdigest()[:16]
    except OSError:
        return "unknown"


def _table_path(run: Path) -> Path:
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
