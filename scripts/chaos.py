"""Simulated chaos: many seeds of delays, reordering, duplicates, deaths and hangs against the real controller.

    python scripts/chaos.py [--seeds 10000] [--first 0] [--jobs N]
    python scripts/chaos.py --seed 4711          # replay one seed and show its scenario

There are no processes and no files: a virtual clock drives the same state machine as in a job, and every rule of the flow is
checked after every event (see tests/helpers/world.py). A seed that breaks a rule is printed with the command that replays it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.chaos import play, scene_of


def play_range(first: int, count: int) -> int:
    """Play a range of seeds; returns how many failed."""
    events = faults = failed = 0
    for seed in range(first, first + count):
        try:
            chaos = play(seed)
        except AssertionError as error:
            failed += 1
            print(
                f"seed {seed}: {str(error).splitlines()[0]}\n  again: python scripts/chaos.py --seed {seed}", flush=True
            )
            continue
        events, faults = events + len(chaos.history), faults + chaos.faults
    print(f"seeds {first} to {first + count - 1}: {events:,} events, {faults:,} faults, {failed} failed", flush=True)
    return failed


def replay(seed: int) -> int:
    print(scene_of(seed))
    try:
        chaos = play(seed)
    except AssertionError:
        traceback.print_exc()
        return 1
    print(f"no rule was broken: {len(chaos.history)} events, {chaos.faults} faults, {chaos.now_s:.0f} virtual seconds")
    return 0


def play_in_parallel(first: int, count: int, jobs: int) -> int:
    """Play a range of seeds in several processes; returns how many processes failed."""
    share = -(-count // jobs)
    starts = range(first, first + count, share)
    command = [sys.executable, __file__, "--jobs", "1"]
    processes = [
        subprocess.Popen([*command, "--first", str(start), "--seeds", str(min(share, first + count - start))])
        for start in starts
    ]
    return sum(process.wait() != 0 for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="replay only this seed")
    args = parser.parse_args()
    if args.seed is not None:
        sys.exit(replay(args.seed))
    started_s = time.monotonic()
    if args.jobs == 1:
        sys.exit(play_range(args.first, args.seeds) > 0)
    failed = play_in_parallel(args.first, args.seeds, args.jobs)
    print(
        f"{args.seeds:,} seeds in {time.monotonic() - started_s:.0f} s: {'FAILED' if failed else 'no rule was broken'}"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
