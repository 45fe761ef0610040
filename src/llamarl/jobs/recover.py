"""What a run folder still holds, for a job that resumes it."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from llamarl.config import Config
from llamarl.controller.events import Began, Resumed
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import LedgerState
from llamarl.controller.recovery import resumption
from llamarl.engine.group_store import GroupStore
from llamarl.engine.snapshot_store import SnapshotStore
from llamarl.errors import InputError
from llamarl.io.record_log import segment_files
from llamarl.model.training_state import POLICY
from llamarl.observe.rows import Rows, read_rows
from llamarl.observe.run_folder import EVALUATIONS, GROUPS, LEDGER, METRICS, SNAPSHOTS
from llamarl.observe.summary import Counted, Tally


class Recovered(Struct, frozen=True):
    """What a run folder still holds, as of its newest snapshot that can be used."""

    version: int  # of the snapshot; 0: the beginning
    notes: tuple[str, ...]  # for the user
    unknown: tuple[int, ...]  # versions of snapshots that are not in the ledger
    last_run: int  # number of the last start in the ledger; -1: none
    begin: Began | Resumed
    store: GroupStore
    tally: Tally
    drop_reasons: dict[int, str]  # of dropped groups that are not folded


def recover(folder: Path, config: Config, settled_state: str, last_role: str) -> Recovered:
    """Read everything that the job needs to go on; drops stored groups that it does not need."""
    ledger_state, notes = read_ledger_state(folder), list[str]()
    snapshots = SnapshotStore(folder / SNAPSHOTS, config.snapshots.keep)
    version, unknown = _choose_snapshot(snapshots, ledger_state, notes)
    store = GroupStore(folder / GROUPS, on_damage=None if config.schedule.deterministic else notes.append)
    evaluated = {
        row["version"]: row["accuracy"]
        for row in read_rows(folder / EVALUATIONS)
        if row.keys() >= {"version", "accuracy"} and row["version"] <= version
    }
    begin: Began | Resumed = Began()  # as it stays if the run was killed before anything was on disk
    needed: tuple[int, ...] = ()
    if ledger_state is not None:
        flat = store.without_variance(config.algo.cut_off_penalty) if config.schedule.dynamic_sampling else ()
        begin = resumption(ledger_state, store.scored, version, sorted(evaluated), settled_state, flat)
        needed = begin.settled + tuple(ordinal for batch in begin.batches for ordinal in batch)
    store.keep_only(needed)
    tally = _read_tally(folder / METRICS, version, last_role, notes)
    tally.evaluations = evaluated
    if ledger_state is not None:
        tally.tokens_generated, tally.groups_dropped = ledger_state.num_tokens, ledger_state.num_dropped
        tally.groups_replaced = ledger_state.num_replaced
    last_run = ledger_state.runs[-1].run if ledger_state and ledger_state.runs else -1  # a ledger may hold no row yet
    reasons = ledger_state.drop_reasons if ledger_state else {}
    return Recovered(version, tuple(notes), unknown, last_run, begin, store, tally, reasons)


def read_ledger_state(folder: Path) -> LedgerState | None:
    """What the run's ledger adds up to; None if it was killed before anything was on disk."""
    if segment_files(folder / LEDGER):
        return LedgerState.of(read_ledger(folder / LEDGER))
    made = SnapshotStore(folder / SNAPSHOTS, keep=1).versions()
    if made:
        raise InputError(
            f"--resume: {folder / LEDGER} is gone, so nobody can tell what was trained; a new run can begin with the policy "
            f"of this one: model.path={folder / SNAPSHOTS / str(made[-1]) / POLICY}"
        )
    return None


def _choose_snapshot(
    snapshots: SnapshotStore, ledger_state: LedgerState | None, notes: list[str]
) -> tuple[int, tuple[int, ...]]:
    """The newest whole snapshot that the ledger knows of, or 0 (the beginning); and the snapshots it does not know.

    A snapshot can be newer than the ledger if the folder was copied while the job ran, or the ledger's end was lost. Going on
    from it would train groups again, far beyond the bound on their staleness."""
    known = ledger_state.known_updates if ledger_state else 0
    oldest = ledger_state.folded.updates if ledger_state else 0
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
    """Totals of the updates before `version`, from the undamaged rows of metrics."""
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
