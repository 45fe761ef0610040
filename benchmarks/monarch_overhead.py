"""What the `monarch` engine costs beside `local`, on one machine: time in which nobody works, and time to start.

    python benchmarks/monarch_overhead.py [--updates 20] [--repeats 5] [--restarts 5] [--json result.json]

Needs the extra `monarch`, and a quiet machine. The engines take turns, and who begins alternates, so that what else the
machine does falls on both. Overhead is by how much the median update of the default job (synchronous, colocated) is longer on
monarch than on local; the part of it in which no executor works (`engine_overhead.py`) is shown beside it. Starting is
measured with executors that do nothing. Exits with 1 above 3%.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.engine.engine import Arrival, Death
from llamarl.engine.local.engine import LocalEngine
from llamarl.engine.monarch.install import check_engine
from llamarl.messages import Up

PROMISED = 0.03
ENGINES = ("local", "monarch")
KEYS = ("update_ms", "nobody_ms")
EXECUTOR = "reward/0"
IDLE = Path(__file__).parents[1] / "tests" / "helpers" / "hostile.py"  # executors that tests of engines use
PAUSE_S = 3.2  # who dies sooner after its start would have to wait before the next


def overhead(engine: str, updates: int) -> dict[str, float]:
    script = Path(__file__).with_name("engine_overhead.py")
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, script, "--updates", updates, "--repeats", 1, "--engine", engine, "--json", figures]
        subprocess.run(
            list(map(str, command)), check=False, stdout=subprocess.DEVNULL
        )  # above 3%, it says so by its code
        found: list[dict[str, float]] = json.loads(figures.read_text())
    return found[0]


def starting(engine: str, restarts: int) -> dict[str, float]:
    """Seconds until the first executor of a new engine is up; and, for one that is killed, until that is known and until
    another is up."""
    config = load_config(None, [f"engine={engine}"])
    check_engine(config.engine)
    line = default_line(config)
    builders = {role.name: f"{IDLE.resolve()}:idle_executor" for role in line.roles}
    noticed, back = [], []
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        running = _engine_class(engine)(config, line, builders, {}, Path(folder))
        try:
            running.spawn(EXECUTOR, 0, None)
            _until(running, _is_up)
            first_s = time.monotonic() - began_s
            for incarnation in range(1, restarts + 1):
                _pause(running)
                killed_s = time.monotonic()
                os.kill(running._ranks[EXECUTOR, 0].pid, signal.SIGKILL)
                _until(running, lambda arrival: isinstance(arrival, Death))
                noticed.append(time.monotonic() - killed_s)
                running.spawn(EXECUTOR, incarnation, None)
                _until(running, _is_up)
                back.append(time.monotonic() - killed_s)
        finally:
            running.stop()
    return {"first_s": first_s, "noticed_s": statistics.median(noticed), "back_s": statistics.median(back)}


def _engine_class(engine: str) -> Any:
    if engine == "local":
        return LocalEngine
    from llamarl.engine.monarch.engine import MonarchEngine

    return MonarchEngine


def _is_up(arrival: Arrival | Death) -> bool:
    return isinstance(arrival, Arrival) and isinstance(arrival.report, Up)


def _until(engine: Any, condition: Callable[[Arrival | Death], bool]) -> None:
    while not any(condition(arrival) for arrival in engine.events()):
        pass


def _pause(engine: Any) -> None:
    end_s = time.monotonic() + PAUSE_S
    while time.monotonic() < end_s:
        engine.events()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    rows = []
    for number in range(args.repeats):
        in_turn = ENGINES if number % 2 == 0 else ENGINES[::-1]
        rows.append({engine: overhead(engine, args.updates) for engine in in_turn})
        cells = [f"{engine} {rows[-1][engine]['update_ms']:.1f} ms" for engine in ENGINES]
        print(f"{number + 1} of {args.repeats}: {', '.join(cells)} an update", file=sys.stderr, flush=True)
    starts = {engine: starting(engine, args.restarts) for engine in ENGINES}
    middle = {engine: {key: statistics.median(row[engine][key] for row in rows) for key in KEYS} for engine in ENGINES}
    longer = middle["monarch"]["update_ms"] / middle["local"]["update_ms"] - 1
    idle = (middle["monarch"]["nobody_ms"] - middle["local"]["nobody_ms"]) / middle["local"]["update_ms"]
    print("| | local: update, ms | nobody works, ms | monarch: update, ms | nobody works, ms |")
    print("|---|---:|---:|---:|---:|")
    for name, row in [*((str(number), row) for number, row in enumerate(rows, start=1)), ("median", middle)]:
        print(f"| {name} | {' | '.join(f'{row[engine][key]:.1f}' for engine in ENGINES for key in KEYS)} |")
    print(f"\nan update is longer by {longer:.2%}; nobody works for {idle:.2%} of it more\n")
    print("| engine | first executor up, s | a death is known after, s | the next is up after, s |")
    print("|---|---:|---:|---:|")
    for engine, found in starts.items():
        print(f"| {engine} | {found['first_s']:.2f} | {found['noticed_s']:.3f} | {found['back_s']:.2f} |")
    if args.json:
        args.json.write_text(json.dumps({"overhead": rows, "starting": starts}, indent=2) + "\n")
    sys.exit(longer > PROMISED)


if __name__ == "__main__":
    main()
