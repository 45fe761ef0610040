"""The price of determinism: the same job, asynchronous, with and without `schedule.deterministic`.

    python benchmarks/deterministic.py [--updates 40] [--rounds 3] [KEY=VALUE ...]

No change of weights in flight means that a version's last answers are waited for: that tail is the price. Runs alternate, so
that whatever else the machine does hits both; the median of the pairs' ratios counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from llamarl import Job
from llamarl.config.file import load_config


def train_s(folder: Path, settings: list[str]) -> tuple[float, dict[str, float]]:
    summary = Job(load_config(None, settings)).run(folder)
    return summary.train_s, summary.idle_share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    common = [f"schedule.updates={args.updates}", "evaluate.prompts=0", *args.settings]
    taken: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.rounds):
            for deterministic in (False, True):
                settings = [*common, f"schedule.deterministic={str(deterministic).lower()}"]
                seconds, idle = train_s(Path(temporary) / f"{number}-{deterministic}", settings)
                taken[deterministic].append(seconds)
                waiting = ", ".join(f"{role} {share:.0%}" for role, share in idle.items())
                print(f"deterministic={deterministic}: {seconds:.1f} s; waiting: {waiting}", flush=True)
    ratios = [exact / free for free, exact in zip(taken[False], taken[True], strict=True)]
    print(
        f"deterministic takes {statistics.median(ratios):.2f}x the time (pairs: {', '.join(f'{r:.2f}' for r in ratios)})"
    )


if __name__ == "__main__":
    main()
