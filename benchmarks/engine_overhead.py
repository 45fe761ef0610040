"""What the engine costs: the share of an update during which no executor was working.

    python benchmarks/engine_overhead.py [--updates 40] [--repeats 3] [--engine local] [--json result.json]

The default job, synchronous (max_staleness=0, colocated), so that nothing can hide behind anything
else: at every moment somebody should be working. The time when nobody was is read from the run's timeline. It holds the
messages (encoding, sockets, decoding), the controller, the ledger, the store and the record. Exits with 1 above 3%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from pretending import update_times  # beside this script

from llamarl import Job
from llamarl.config.file import load_config

PROMISED = 0.03
WARM_UP = 3  # updates that are not counted: first calls of everything
SYNCHRONOUS = ["schedule.max_staleness=0", "placement=colocated", "evaluate.prompts=0"]

Interval = tuple[float, float]


def busy_intervals(folder: Path) -> list[Interval]:
    """When any executor was working, in order and without overlap; seconds since the start of the run."""
    rows = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    spans = sorted(
        (row["ts"] / 1e6, (row["ts"] + row["dur"]) / 1e6) for row in rows if row["ph"] == "X" and row["cat"] != "wait"
    )
    merged: list[Interval] = []
    for start_s, end_s in spans:
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def measure(updates: int, engine: str) -> dict[str, float]:
    config = load_config(None, [*SYNCHRONOUS, f"engine={engine}", f"schedule.updates={updates + WARM_UP}"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        Job(config).run(folder)
        busy = busy_intervals(folder)
        at_s = update_times(folder)[WARM_UP - 1 :]
    busy_s = sum(max(0.0, min(end_s, at_s[-1]) - max(start_s, at_s[0])) for start_s, end_s in busy)
    whole_s = at_s[-1] - at_s[0]
    return {"update_ms": 1e3 * whole_s / updates, "nobody_ms": 1e3 * (whole_s - busy_s) / updates}


def share(row: dict[str, float]) -> float:
    return row["nobody_ms"] / row["update_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default="local", choices=["local", "monarch"])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    rows = [measure(args.updates, args.engine) for _ in range(args.repeats)]
    print("| update, ms | nobody works, ms | share |")
    print("|---:|---:|---:|")
    for row in rows:
        print(f"| {row['update_ms']:.1f} | {row['nobody_ms']:.2f} | {share(row):.2%} |")
    print(f"\nmedian share: {statistics.median(map(share, rows)):.2%}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(statistics.median(map(share, rows)) > PROMISED)


if __name__ == "__main__":
    main()
