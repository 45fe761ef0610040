"""How long a run folder of a million updates takes to resume and to audit, and in how much memory.

    python benchmarks/million_updates.py [--updates 1000000] [--groups 4] [--folder DIR] [--json FILE]

The record is made by the code that jobs write it with: every group is issued, generated, scored and trained, a snapshot
covers what came before it every 25 updates, and the ledger folds as it does in a job. Only the groups' contents, the events
and the weights are left out. Then the audit, and what `--resume` does before anything starts, run as processes of their own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from llamarl.config import Config, ScheduleConfig
from llamarl.config.file import config_to_yaml
from llamarl.controller.ledger import Issued, Opened, Passed, Trained, Visible
from llamarl.controller.ledger_file import LedgerFile
from llamarl.io.append_file import AppendFile
from llamarl.io.record_log import segment_files
from llamarl.model.training_state import MANIFEST, SnapshotManifest

EVERY, KEEP = 25, 2
# A row of metrics as long as the default job's.
METRICS = {
    name: 0.1234567 for name in ("reward_std", "kl", "ratio_mean", "ratio_max", "entropy", "loss", "grad_norm", "lr")
}
METRICS |= {f"further_figure_{number}": 0.1234567 + number for number in range(16)}
RESUME = """
from llamarl.config.file import load_config
from llamarl.jobs.recover import recover
folder = Path(sys.argv[1])
found = recover(folder, load_config(folder / "config.yaml"), "scored", "trainer")
assert found.version == found.tally.updates == int(sys.argv[2]) and found.tally.tokens_generated, found.version
"""
AUDIT = """
from llamarl.controller.ledger_state import audit
from llamarl.controller.ledger import read_ledger
found = audit(read_ledger(Path(sys.argv[1]) / "ledger"))
assert found.consistent and found.updates == int(sys.argv[2])
"""
MEASURED = """
import sys, time
from pathlib import Path
import llamarl.jobs.recover
started_s = time.monotonic()
{code}
peak_kb = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.monotonic() - started_s, int(peak_kb) / 1024)
"""


def make_run(folder: Path, updates: int, groups: int) -> int:
    """Returns the largest size that the ledger had on the way."""
    config = Config(schedule=ScheduleConfig(updates=updates + 1000, groups_per_update=groups))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config_to_yaml(config))
    ledger, metrics = LedgerFile(folder / "ledger"), AppendFile(folder / "metrics.jsonl", buffer_bytes=1 << 20)
    ledger.append(Opened(config.schedule.num_groups, groups))
    largest, started_s = 0, time.monotonic()
    for update in range(updates):
        ordinals = tuple(range(update * groups, (update + 1) * groups))
        for ordinal in ordinals:
            ledger.append(Issued(ordinal, "generator/0", update))
            ledger.append(Passed(ordinal, "generated", 212, update, update, 0.0))
            ledger.append(Passed(ordinal, "scored", 212, update, update, 0.625))
        ledger.append(Trained(update, ordinals))
        ledger.append(Visible(update + 1))
        metrics.append_json(
            {"update": update, "role": "trainer", "groups": groups, "trained_tokens": 200, "reward": 0.5, **METRICS}
        )
        if (update + 1) % EVERY == 0:
            before = ledger._unfolded_bytes
            ledger.fold(update + 1 - EVERY * (KEEP - 1))
            largest = max(largest, before)
        if (update + 1) % 100_000 == 0:
            print(f"made {update + 1:,} updates in {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    ledger.close()
    metrics.close()
    newest = folder / "snapshots" / str(updates - updates % EVERY)
    newest.mkdir(parents=True)
    (newest / MANIFEST).write_bytes(msgspec.json.encode(SnapshotManifest(int(newest.name), {})))
    return largest


def measure(code: str, *args: object) -> tuple[float, float]:
    """Seconds without imports, and the most memory in megabytes with them, of a process that runs this."""
    command = [sys.executable, "-c", MEASURED.format(code=code), *map(str, args)]
    seconds, megabytes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(megabytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="keep the run here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "run"
        largest = make_run(folder, args.updates, args.groups)
        newest = args.updates - args.updates % EVERY
        _, imports_mb = measure("pass")
        resume_s, resume_mb = measure(RESUME, folder, newest)
        audit_s, audit_mb = measure(AUDIT, folder, args.updates)
        found = {
            "updates": args.updates,
            "groups": args.updates * args.groups,
            "ledger_mb": sum(path.stat().st_size for path in segment_files(folder / "ledger")) / 2**20,
            "largest_ledger_mb": largest / 2**20,
            "metrics_mb": (folder / "metrics.jsonl").stat().st_size / 2**20,
            "imports_mb": imports_mb,
            "resume_s": resume_s,
            "resume_mb": resume_mb,
            "audit_s": audit_s,
            "audit_mb": audit_mb,
        }
    for name, value in found.items():
        print(f"{name:<20}{value:>14,.1f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
