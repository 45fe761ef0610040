"""Soak test: real kills and stops for as long as you like, of all roles, in all states, and of the job itself.

    python scripts/soak.py [--kills 200] [--every 5] [--seed 0] [--keep DIR] [KEY=VALUE ...]

Runs the job once undisturbed, then again and again under fire until all kills are done; a run is resumed when its own process
was killed. At the end every run must be finished with a clean ledger, and its held-out accuracy must be within the noise of
the undisturbed run's. The exit code is 0 if so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.outside import ROBUST, Disturber, RunningJob

from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit

TOLERANCE = 0.06  # allowed loss of accuracy: the difference between seeds alone
RUN_S = 3600.0  # time limit of a single job


def undisturbed(folder: Path, settings: list[str]) -> float:
    job = RunningJob(folder, settings)
    try:
        if job.wait(RUN_S):
            sys.exit("the undisturbed run failed")
    finally:
        job.end()
    return float(job.summary["eval_after"])


def under_fire(folder: Path, settings: list[str], disturber: Disturber, kills: int, target: float) -> list[str]:
    """Run a job under fire; returns a list of what is wrong with it."""
    job = RunningJob(folder, settings)
    try:
        disturber.disturb(job, kills)
        code = job.wait(RUN_S)
    finally:
        job.end()
    if code:
        return [f"{folder.name} ended with exit code {code}"]
    found = audit(read_ledger(folder / "ledger"))
    accuracy, restarts = job.summary["eval_after"], job.summary["restarts"]
    print(
        f"{folder.name}: finished, accuracy {accuracy:.3f}, {restarts} restarts since the last resume, "
        f"{found.rewinds} rewinds, {'clean' if found.clean else 'NOT CLEAN'}",
        flush=True,
    )
    wrong = [] if found.clean else [f"{folder.name}: the audit is not clean"]
    if accuracy < target - TOLERANCE:
        wrong.append(f"{folder.name}: accuracy {accuracy:.3f}, undisturbed {target:.3f}")
    return wrong


def soak(folder: Path, args: argparse.Namespace) -> list[str]:
    settings = [*ROBUST, "engine.silence_s=5", *args.settings]
    target = undisturbed(folder / "undisturbed", [*settings, "seed=0"])
    print(f"undisturbed: accuracy {target:.3f}", flush=True)
    disturber, round_number = Disturber(args.seed, args.every), 0
    wrong: list[str] = []
    while len(disturber.done) < args.kills and not wrong:
        run, left = folder / f"run-{round_number}", args.kills - len(disturber.done)
        wrong += under_fire(run, [*settings, f"seed={round_number}"], disturber, left, target)
        round_number += 1
    counted = Counter(line.split()[0] for line in disturber.done)
    states = Counter(line.split(maxsplit=1)[1] for line in disturber.done)
    print(f"{len(disturber.done)} kills and stops over {round_number} runs: {dict(counted)}; {dict(states)}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills or stops")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the runs; without it they are removed")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        wrong = soak(args.keep or Path(temporary), args)
    for line in wrong:
        print(f"WRONG: {line}")
    print(f"soak {'FAILED' if wrong else 'passed'} after {time.monotonic() - started_s:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
