"""Resuming a run: refuse what cannot continue, tell what changed, and go on from the newest snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from llamarl.config import Config
from llamarl.config.file import parse_config, read_config
from llamarl.controller.events import Resumed
from llamarl.controller.ledger import FINISHED
from llamarl.engine.snapshot_store import SnapshotStore
from llamarl.errors import InputError
from llamarl.jobs.changed_settings import describe_changes, refuse_other_length
from llamarl.jobs.folder import OpenRun, closed_on_failure, one_line_on_failure, record_start
from llamarl.jobs.prepare import PreparedJob
from llamarl.jobs.recover import read_ledger_state, recover
from llamarl.jobs.run import run_job
from llamarl.model.training_state import POLICY, keeps_policy_only
from llamarl.observe.callbacks import Callback
from llamarl.observe.display import Display
from llamarl.observe.final_report import resume_command
from llamarl.observe.run_folder import CONFIG, SNAPSHOTS, SUMMARY, RunFolder
from llamarl.observe.run_lock import RunLock, refuse_locked
from llamarl.observe.starts import Starts
from llamarl.observe.summary import Summary
from llamarl.tasks.dataset_files import files_of


def resume_job(job: PreparedJob, path: Path, display: Display, callbacks: Sequence[Callback] = ()) -> Summary:
    refuse_locked(path)
    last, now = Starts(path).last(), job.config
    before = parse_config(last.config) if last else read_config(path / CONFIG)
    changed = describe_changes(before, now)
    _refuse_ended(path)
    if (finished := _finished(path, now)) is not None:
        more = f"{resume_command(path)} schedule.updates={2 * now.schedule.updates}"
        display.note(f"this run is finished; for more than its {now.schedule.updates} updates: {more}")
        return finished
    with one_line_on_failure(path):
        opened = _reopen(job, path, before, changed, display)
    return run_job(job, opened, display, callbacks)


def _reopen(job: PreparedJob, path: Path, before: Config, changed: Iterable[str], display: Display) -> OpenRun:
    lock, now, line = RunLock(path), job.config, job.line
    with closed_on_failure(lock.release):
        recovered = recover(path, now, line.group_roles[-1].done, line.batch_roles[-1].name)
        refuse_other_length(before.schedule.updates, now.schedule, recovered.version)
        for version in recovered.unknown:
            SnapshotStore(path / SNAPSHOTS, keep=1).set_aside(version)
        folder = RunFolder.reopen(
            path,
            lock,
            recovered.version,
            job.training_roles,
            last_run=recovered.last_run,
            settings=now.observe,
            updates=now.schedule.updates,
        )
        for note in (*recovered.notes, *changed, *Starts(path).changed_files(now, files_of(now))):
            display.note(note)
        record_start(folder, now, recovered.version)
    start = f"the snapshot of version {recovered.version}" if recovered.version else "the beginning"
    display.note(f"resuming from {start}; {len(recovered.store)} scored groups are still there")
    begin = recovered.begin
    if isinstance(begin, Resumed):
        begin = replace(begin, run=folder.run)
    return OpenRun(folder, recovered.store, begin, recovered.tally, recovered.drop_reasons)


def _refuse_ended(folder: Path) -> None:
    """A run that kept its policy alone has nothing to go on from."""
    snapshots = SnapshotStore(folder / SNAPSHOTS, keep=1)
    for version in snapshots.versions()[-1:]:
        if keeps_policy_only(snapshots.path(version)):
            raise InputError(
                f"--resume: {folder} ended after update {version} and kept its policy only (snapshots.at_end=policy); "
                f"a new run can begin with it: model.path={snapshots.path(version) / POLICY}"
            )


def _finished(folder: Path, config: Config) -> Summary | None:
    """The summary of a run that made all its updates and has its last snapshot; None if this job asks for more. The ledger
    decides; it is read only if the summary says finished too."""
    try:
        summary = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=Summary)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if summary.outcome != FINISHED or config.schedule.updates != summary.updates:
        return None
    ledger_state = read_ledger_state(folder)
    if ledger_state is None or ledger_state.closed != FINISHED or config.schedule.updates != ledger_state.updates:
        return None
    newest, _ = SnapshotStore(folder / SNAPSHOTS, keep=1).newest_whole()
    return None if config.snapshots.at_end != "none" and newest < ledger_state.updates else summary
