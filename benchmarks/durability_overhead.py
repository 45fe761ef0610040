"""What does it cost that nothing can be lost? The time of ledger, store, syncs and snapshots within one undisturbed run.

    python benchmarks/durability_overhead.py [--updates 40] [--json result.json] [KEY=VALUE ...]

Counted is all that makes somebody wait: in the job's own process the records written, the groups stored, the syncs and the
making of snapshots; in the trainer the copy that a snapshot is written from. The writing itself goes on in a thread beside
training and is not counted. Exits with 1 when the waits are more than 2% of the time spent training.
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

from llamarl import Job, job
from llamarl.config.file import load_config
from llamarl.engine.driver import Driver
from llamarl.engine.group_store import GroupStore

PROMISED = 0.02
spent_s: dict[str, float] = defaultdict(float)


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*args: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return call(*args)
        finally:
            spent_s[name] += time.perf_counter() - started_s

    return measured


class TimedDriver(Driver):
    _write = timed("ledger records", Driver._write)
    _sync = timed("syncs", Driver._sync)
    _save = timed("snapshots begun", Driver._save)
    _commit = timed("snapshots committed", Driver._commit)
    _prune = timed("snapshots removed", Driver._prune)
    _forget = timed("groups forgotten", Driver._forget)


class TimedStore(GroupStore):
    put = timed("groups stored", GroupStore.put)


def copies(folder: Path) -> list[float]:
    """Seconds that the trainer stood still for each snapshot."""
    rows = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    return [row["dur"] / 1e6 for row in rows if row["name"] == "SaveState"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    vars(job).update(Driver=TimedDriver, GroupStore=TimedStore)
    settings = [f"schedule.updates={args.updates}", "evaluate.prompts=0", *args.settings]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        summary = Job(load_config(None, settings)).run(folder)
        copied = copies(folder)
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
