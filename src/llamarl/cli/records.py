"""`llamarl audit` and `llamarl replay`: what the record of a run says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import Audit, audit
from llamarl.controller.replay import replay
from llamarl.errors import InputError
from llamarl.io.record_log import segment_files
from llamarl.observe.event_log import event_files, read_events
from llamarl.observe.final_report import resume_command
from llamarl.observe.run_folder import CURRICULUM, LEDGER

_UNFINISHED = 4  # exit code of `audit`


def audit_command(run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]) -> None:
    """Say whether every group was trained exactly once or dropped with a reason; reads only the ledger, and the record of a
    curriculum. Exit code 0: yes; 1: no; 4: so far, but the run is unfinished."""
    if not run.is_dir():
        raise InputError(f"{run}: no such run folder")
    if not segment_files(run / LEDGER):
        raise InputError(f"{run}: holds no run: no ledger there")
    found = audit(read_ledger(run / LEDGER))
    asked = _audit_choices(run)
    print("\n".join(filter(None, [asked, _describe_audit(found, run)])))
    if asked.startswith("NOT"):
        raise typer.Exit(1)
    if not found.clean:
        raise typer.Exit(_UNFINISHED if found.only_unfinished else 1)


def _audit_choices(run: Path) -> str:
    """Whether a curriculum asked what its rule says, in one line; empty: the run has none."""
    if not segment_files(run / CURRICULUM):
        return ""
    from llamarl.engine.curriculum_log import read_curriculum
    from llamarl.tasks.curriculum import audit_curriculum

    rule, outcomes = read_curriculum(run / CURRICULUM)
    if rule is None:
        return ""
    found = audit_curriculum(rule, outcomes)
    if found.differences or found.told_twice:
        ordinals = ", ".join(map(str, (found.differences or found.told_twice)[:10]))
        what = "asked another problem than the rule says" if found.differences else "with two outcomes"
        return f"NOT as the curriculum says: groups {what}: {ordinals}"
    return f"curriculum: the problems of {found.num_outcomes} groups are those that its rule says"


def replay_command(run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]) -> None:
    """Tell a run's recorded events to a fresh controller, and hold what it writes against the ledger."""
    logs = {number: read_events(path) for number, path in event_files(run).items()}
    if not logs:
        is_run = bool(segment_files(run / LEDGER))
        raise InputError(f"{run}: {'its event log is gone' if is_run else 'no run folder with an event log'}")
    found = replay(logs, read_ledger(run / LEDGER))
    print(f"{found.runs} runs, {found.num_events:,} events, {found.num_records:,} ledger records")
    for note in found.notes:
        print(note)
    if found.difference:
        print(found.difference)
        raise typer.Exit(1)
    if not found.num_records:
        print("nothing was left to compare")
        raise typer.Exit(1)
    print("the replayed controller wrote the same")


def _describe_audit(found: Audit, run: Path) -> str:
    dropped = "".join(f"\n  {count} dropped: {reason}" for reason, count in found.dropped.items())
    lines = [
        f"{found.num_groups} groups, {found.updates} updates, {found.rewinds} rewinds",
        f"  {found.trained} trained exactly once, at most {found.max_staleness} versions stale{dropped}",
    ]
    for name, count, ordinals in (
        (
            "not trained yet" if found.only_unfinished else "neither trained nor dropped",
            found.num_unfinished,
            found.unfinished,
        ),
        ("counted more than once", len(found.counted_twice), found.counted_twice),
        ("never issued", len(found.never_issued), found.never_issued),
    ):
        if count:
            shown = ", ".join(map(str, ordinals[:10])) + (" ..." if count > 10 else "")
            lines.append(f"  {count} {name}: {shown}")
    if found.digest:
        lines.append(f"  digest of what was trained: {found.digest}")
    lines.append(f"closed: {found.closed}" if found.closed else "not closed: the job is running, or was killed")
    if found.only_unfinished:
        return "\n".join([*lines, f"clean so far, but unfinished; go on with: {resume_command(run)}"])
    return "\n".join([*lines, "clean" if found.clean else "NOT clean"])
