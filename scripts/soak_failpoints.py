"""Soak test: a kill and a stop at every failpoint, each in its own job, which must end with a clean audit.

python scripts/soak_failpoints.py [--side-by-side 2]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.failing import all_failpoints, run_and_resume
from helpers.warm import fork_server

Case = tuple[str, str, int]


def outcome(folder: Path, case: Case) -> str:
    """Run one case; returns what went wrong, or "" if nothing did."""
    name, action, nth = case
    place = folder / f"{name}-{action}-{nth}"
    place.mkdir()
    try:
        found = run_and_resume(place, name, action, nth)
    except AssertionError as error:
        return f"{name} {action}: {error}"
    return "" if found.clean else f"{name} {action}: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side-by-side", type=int, default=2)
    args = parser.parse_args()
    names = all_failpoints()
    cases: list[Case] = [(name, action, nth) for name in names for action in ("kill", "stop") for nth in (1, 2)]
    wrong = 0
    fork_server()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.side_by_side) as pool:
        results = pool.map(lambda case: outcome(Path(temporary), case), cases)
        for case, problem in zip(cases, results, strict=True):
            wrong += bool(problem)
            print(f"{'WRONG  ' + problem if problem else 'clean'}  {' '.join(map(str, case))}", flush=True)
    print(f"{len(cases)} failures at {len(names)} places: {wrong} went wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
