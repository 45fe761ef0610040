"""Going on with a run: which settings may differ, and what is still there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llamarl.config import Config, ScheduleConfig
from llamarl.config.paths import with_absolute_paths
from llamarl.controller.books import Books
from llamarl.controller.events import Began, Resumed
from llamarl.controller.ledger import read_ledger
from llamarl.controller.recovery import resumption
from llamarl.engine.group_store import GroupStore
from llamarl.engine.snapshots import Snapshots
from llamarl.errors import ConfigError, InputError
from llamarl.io.record_log import segment_files
from llamarl.model.training_state import POLICY, keeps_policy_only
from llamarl.observe.rows import Rows, read_rows
from llamarl.observe.run_folder import EVALUATIONS, GROUPS, LEDGER, METRICS, SNAPSHOTS
from llamarl.observe.summary import Counted, Tally

# These change where and how fast a run goes on, how it is watched, or how it learns from here on; docs/durability.md has
# the same list for people.
FREE = (
    "engine",
    "placement",
    "observe",
    "snapshots",
    "evaluate",
    "weights",
    "generator.replicas",
    "generator.device",
    "generator.tensor",
    "generator.slots",
    "generator.kv_pages",
    "generator.burst",
    "generator.threads",
    "trainer.lr",
    "trainer.final_lr_share",
    "trainer.tokens_per_pack",
    "trainer.recompute",
    "trainer.compile",
    "trainer.offload",
    "trainer.device",
    "trainer.threads",
    "reference.device",
    "reference.threads",
    "reward.workers",
    "reward.trusted",
    "reward.concurrency",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.retries",
    "reward.max_failure_share",
    "reward_model.device",
    "reward_model.threads",
    "llm_judge.url",
    "llm_judge.key_env",
    "llm_judge.timeout_s",
    "llm_judge.retries",
    "conversation.workers",
    "conversation.timeout_s",
    "conversation.memory_mb",
    "conversation.retries",
    "conversation.max_failure_share",
    "schedule.max_restarts",
    "schedule.max_attempts",
    "schedule.max_skipped",
    "schedule.updates",
)


class Recovered(Struct, frozen=True):
    """What a run folder still holds, as of its newest snapshot that can be used."""

    version: int
    notes: tuple[str, ...]  # what the user should know of it
    unknown: tuple[int, ...]  # snapshots that the ledger knows nothing of
    last_run: int  # the last start of the job that the ledger knows of; -1: none
    begin: Began | Resumed
    store: GroupStore
    tally: Tally


def recover(folder: Path, config: Config, settled_state: str, last_role: str) -> Recovered:
    books, notes = read_books(folder), list[str]()
    snapshots = Snapshots(folder / SNAPSHOTS, config.snapshots.keep)
    version, unknown = _choose_snapshot(snapshots, books, notes)
    store = GroupStore(folder / GROUPS, on_damage=None if config.schedule.deterministic else notes.append)
    evaluated = {
        row["version"]: row["accuracy"]
        for row in read_rows(folder / EVALUATIONS)
        if row.keys() >= {"version", "accuracy"} and row["version"] <= version
    }
    begin: Began | Resumed = Began()  # killed before anything was on disk
    needed: tuple[int, ...] = ()
    if books is not None:
        begin = resumption(books, store.scored, version, sorted(evaluated), settled_state)
        needed = begin.settled + tuple(ordinal for batch in begin.batches for ordinal in batch)
    store.keep_only(needed)
    tally = _read_tally(folder / METRICS, version, last_role, notes)
    tally.evaluations = evaluated
    if books is not None:
        tally.tokens_generated, tally.groups_dropped = books.num_tokens, books.num_dropped
    last_run = books.runs[-1].run if books and books.runs else -1  # a ledger may hold no row yet
    return Recovered(version, tuple(notes), unknown, last_run, begin, store, tally)


def read_books(folder: Path) -> Books | None:
    """The run's books; None where it was killed before anything was on disk."""
    if segment_files(folder / LEDGER):
        return Books.of(read_ledger(folder / LEDGER))
    made = Snapshots(folder / SNAPSHOTS, keep=1).versions()
    if made:
        raise InputError(
            f"--resume: {folder / LEDGER} is gone, so nobody can tell what was trained; a new run can begin with the policy "
            f"of this one: model.path={folder / SNAPSHOTS / str(made[-1]) / POLICY}"
        )
    return None


def _choose_snapshot(snapshots: Snapshots, books: Books | None, notes: list[str]) -> tuple[int, tuple[int, ...]]:
    """The newest whole snapshot that the ledger knows of, 0 (the beginning) if there is none; and those it does not know.

    A snapshot newer than its ledger is of another time: the folder was copied while the job ran, or the ledger's end was
    lost. Going on from it would train groups again, far beyond the bound on their staleness."""
    known = books.known_updates if books else 0
    oldest = books.folded.updates if books else 0
    unknown = tuple(version for version in snapshots.versions() if version > known)
    notes += (f"snapshot {version} cannot be used: the ledger ends with update {known}" for version in unknown)
    version, problems = snapshots.newest_whole(among=range(oldest, known + 1))
    notes += problems
    if version:
        return version, unknown
    if unknown:
        raise InputError(
            f"--resume: the ledger ends with update {known}, but the only snapshot is of version {unknown[0]}: parts of "
            "this folder are from different times; copy it again while the job does not run"
        )
    if known:
        notes.append(f"the ledger knows of {known} updates, but there is no snapshot of them: they are made again")
    return 0, ()


def _read_tally(path: Path, version: int, last_role: str, notes: list[str]) -> Tally:
    """Totals of the updates before `version`, from the rows of metrics that are still whole."""
    tally, rows = Tally(), Rows(path, _MetricsRow)
    for row in rows:
        if 0 <= row.update < version and row.role == last_role:
            tally.add(row.update, row)
    if rows.warning:
        notes.append(rows.warning)
    if tally.updates < version:
        notes.append(f"{path}: holds {tally.updates} of {version} updates, so totals are of these alone")
    return tally


class _MetricsRow(Counted, frozen=True):
    """A row of metrics.jsonl."""

    update: int = -1
    role: str = ""


def refuse_ended(folder: Path) -> None:
    """A run that kept its policy alone has nothing to go on from."""
    snapshots = Snapshots(folder / SNAPSHOTS, keep=1)
    for version in snapshots.versions()[-1:]:
        if keeps_policy_only(snapshots.path(version)):
            raise InputError(
                f"--resume: {folder} ended after update {version} and kept its policy only (snapshots.at_end=policy); "
                f"a new run can begin with it: model.path={snapshots.path(version) / POLICY}"
            )


def changes(before: Config, now: Config) -> list[str]:
    """What has changed in the settings, a line each. Those that would make it another run are refused by name."""
    old, new = (_flat(msgspec.to_builtins(with_absolute_paths(config))) for config in (before, now))
    told: list[str] = []
    for key in [*old.keys() - new.keys(), *new]:
        if old.get(key) == new.get(key):
            continue
        if not any(key == prefix or key.startswith(f"{prefix}.") for prefix in FREE):
            raise ConfigError(
                f"--resume: {key} was {old.get(key)!r} and is now {new.get(key)!r}, which would make it another run; "
                "leave it, or start a new one"
            )
        told.append(f"{key}: {old.get(key)!r} so far, {new.get(key)!r} from here on")
    return told


def refuse_other_length(before: int, schedule: ScheduleConfig, version: int) -> None:
    """More updates than `before` may follow, as long as the versions that must sample their groups are still there."""
    if schedule.updates < version:
        raise ConfigError(f"--resume: schedule.updates={schedule.updates}, but {version} updates are already made")
    if schedule.deterministic and schedule.updates > before < version + schedule.max_staleness:
        raise ConfigError(
            f"--resume: schedule.updates={schedule.updates}, but with schedule.deterministic, update {before} is sampled "
            f"by version {before - schedule.max_staleness}, which is gone; it can be made longer before its end, or with "
            "schedule.max_staleness=0"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
