"""Makes a large run folder without training, in the real formats, for benchmarks of what reads it.

    python scripts/make_large_run.py FOLDER [--updates 10000] [--groups 25] [--samples 8] [--tokens 40]

The defaults are two million rollouts: about 3 GB, in some minutes. All of them are kept (`observe.rollouts_mb=-1`).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.made_runs import Shape, make_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=25, help="groups per update")
    parser.add_argument("--samples", type=int, default=8, help="answers per group")
    parser.add_argument("--tokens", type=int, default=40, help="mean tokens of an answer")
    asked = parser.parse_args()
    began_s = time.monotonic()
    shape = Shape(
        updates=asked.updates,
        groups=asked.groups,
        samples=asked.samples,
        tokens=asked.tokens,
        deaths=True,
        settings={"observe": {"rollouts_mb": -1}},
    )
    make_run(asked.folder, shape)
    size = sum(path.stat().st_size for path in asked.folder.rglob("*") if path.is_file())
    rollouts = asked.updates * asked.groups * asked.samples
    print(
        f"{asked.folder}: {asked.updates:,} updates, {rollouts:,} rollouts, {size / 1e9:.2f} GB, "
        f"in {time.monotonic() - began_s:.0f} s"
    )


if __name__ == "__main__":
    main()
