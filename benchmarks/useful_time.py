"""How much of the time is useful when executors keep dying? The same updates, undisturbed and with kills.

    python benchmarks/useful_time.py [--kills 15] [--every 20] [--updates N] [--json result.json] [KEY=VALUE ...]

Useful time is the wall time without faults over the wall time with them, start-up included in both. Without --updates a
short run is timed first, to choose so many that the kills fall within the run. Exits with 1 when it is less than 80%.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.outside import ROBUST, Disturber, RunningJob

from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit

PROMISED, HOPED = 0.80, 0.90
TRIAL_UPDATES = 20
RUN_S = 3600.0


def timed_run(folder: Path, settings: list[str], disturber: Disturber | None = None, kills: int = 0) -> RunningJob:
    """Its wall time is in its summary, from the first command to the last."""
    job = RunningJob(folder, settings)
    try:
        if disturber:
            disturber.disturb(job, kills)
        if job.wait(RUN_S):
            sys.exit(f"{folder.name}: the run failed")
    finally:
        job.end()
    if not audit(read_ledger(folder / "ledger")).clean:
        sys.exit(f"{folder.name}: the audit is not clean")
    return job


def updates_for(seconds: float, folder: Path, settings: list[str]) -> int:
    trial = timed_run(folder, [*settings, f"schedule.updates={TRIAL_UPDATES}"])
    return max(TRIAL_UPDATES, round(seconds / float(trial.summary["train_s"]) * TRIAL_UPDATES))


def wall_s(folder: Path, settings: list[str], disturber: Disturber | None = None, kills: int = 0) -> float:
    started_s = time.monotonic()
    timed_run(folder, settings, disturber, kills)
    return time.monotonic() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--updates", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    settings = [*ROBUST, "evaluate.prompts=0", *args.settings]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # A little longer than the kills take, so that the last of them falls within the run.
        updates = args.updates or updates_for((args.kills + 2) * args.every, folder / "trial", settings)
        settings.append(f"schedule.updates={updates}")
        disturber = Disturber(args.seed, args.every, controller_share=0.0, stop_share=0.0)
        without_s = wall_s(folder / "undisturbed", settings)
        with_s = wall_s(folder / "disturbed", settings, disturber, args.kills)
    useful = without_s / with_s
    print(f"{updates} updates: {without_s:.1f} s undisturbed, {with_s:.1f} s with {len(disturber.done)} kills")
    print(f"useful time {useful:.1%} (must {PROMISED:.0%}, hoped for {HOPED:.0%})")
    if args.json:
        result = {"updates": updates, "undisturbed_s": without_s, "disturbed_s": with_s, "kills": disturber.done}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(useful < PROMISED)


if __name__ == "__main__":
    main()
