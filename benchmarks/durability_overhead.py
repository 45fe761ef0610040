"""What does it cost that nothing can be lost? The time of ledger, store, syncs and snapshots within one undisturbed run.

    python benchmarks/durability_overhead.py [--updates 40] [--json result.json] [KEY=VALUE ...]

Counted is all that makes somebody wait: in the job's own process the records written, the groups stored, the syncs, the
making of snapshots, the rollouts that are kept for reading; in the trainer the copy that a snapshot is written from. The
writing itself goes on in a thread beside training and is not counted. Exits with 1 when the waits are more than 2% of the
time spent training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.engine import driver
from llamarl.engine.driver import Driver
from llamarl.engine.group_store import GroupStore
from llamarl.engine.kept_rollouts import KeptRollouts
from llamarl.jobs import folder as job_folder
from llamarl.jobs import run as job_run

PROMISED = 0.02
spent_s: dict[str, float] = defaultdict(float)


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*args: Any, **named: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            spent_s[name] += time.perf_counter() - started_s

    return measured


class TimedDriver(Driver):
    _write = timed("ledger records and kept rollouts", Driver._write)
    _sync = timed("syncs", Driver._sync)
    _save = timed("snapshots begun", Driver._save)
    _commit = timed("snapshots committed", Driver._commit)
    _prune = timed("snapshots removed", Driver._prune)
    _forget = timed("groups forgotten", Driver._forget)


class TimedRollouts(KeptRollouts):
    write = timed("kept rollouts", KeptRollouts.write)
    wanted = timed("rollouts chosen", KeptRollouts.wanted)


class TimedStore(GroupStore):
    put = timed("groups stored", GroupStore.put)


def copies(folder: Path) -> list[float]:
    """Seconds that the trainer stood still for each snapshot."""
    rows = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    return [row["dur"] / 1e6 for row in rows if row["name"] == "SaveState"]


def reports(folder: Path) -> float:
    """Seconds that the trainer took to report the log-probs of kept rollouts."""
    rows = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    return float(sum(row.get("logprobs_s", 0.0) for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    vars(job_run).update(Driver=TimedDriver)
    vars(job_folder).update(GroupStore=TimedStore)
    vars(driver).update(KeptRollouts=TimedRollouts)
    settings = [f"schedule.updates={args.updates}", "evaluate.prompts=0", *args.settings]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        summary = Job(load_config(None, settings)).run(folder)
        copied, reported_s = copies(folder), reports(folder)
    spent_s["ledger records"] = spent_s.pop("ledger records and kept rollouts") - spent_s["kept rollouts"]
    spent_s["log-probs of kept rollouts"] = reported_s
    spent_s["copies for snapshots"] = sum(copied)
    print(f"| what | seconds of {summary.train_s:.1f} | share |\n|---|---:|---:|")
    for name, seconds in spent_s.items():
        print(f"| {name} | {seconds:.4f} | {seconds / summary.train_s:.3%} |")
    share = sum(spent_s.values()) / summary.train_s
    print(f"| **all** | {sum(spent_s.values()):.4f} | **{share:.2%}** |")
    print(f"{args.updates} updates, {len(copied)} snapshots")
    if args.json:
        args.json.write_text(json.dumps({**spent_s, "train_s": summary.train_s}, indent=2) + "\n")
    sys.exit(share > PROMISED)


if __name__ == "__main__":
    main()
