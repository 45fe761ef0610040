"""Runs jobs with an armed failpoint, and checks what must be true afterwards."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from helpers.killing import TINY
from helpers.outside import RunningJob, process_state
from helpers.warm import WarmProcess
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import Audit, audit
from llamarl.failpoints import VARIABLE

SOURCE = Path(__file__).parents[2] / "src" / "llamarl"
SMALL = (
    *TINY,
    "schedule.updates=6",
    "schedule.groups_per_update=2",
    "snapshots.every=1",  # a snapshot is skipped while the last one is being written, so a fast run makes about half of them
    "snapshots.keep=1",
    "evaluate.prompts=8",
    "engine.silence_s=1.5",
    "weights.lease_s=1",
    "schedule.max_restarts=9",
    "schedule.max_attempts=99",
)
SEGMENT_BYTES = 600  # instead of many megabytes, which a short run would not fill
_RUN_S = 120.0


def all_failpoints() -> list[str]:
    """Names of all failpoints, read from the source, so that new ones are included. Names must be unique."""
    found: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint":
                assert isinstance(node.args[0], ast.Constant)
                found.append(str(node.args[0].value))
    return found


def run_and_resume(folder: Path, name: str, action: str, nth: int, settings: Sequence[str] = ()) -> Audit:
    """Run `llamarl train` with the failpoint armed; if that ends or stops the job itself, resume without it."""
    flag = folder / "reached"
    start = partial(WarmProcess, segment_bytes=SEGMENT_BYTES)
    armed = {VARIABLE: f"{name}:{action}:{nth}:{flag}"}
    job = RunningJob(folder / "run", ["engine=local", *SMALL, *settings], environment=armed, start=start)
    try:
        deadline_s = time.monotonic() + _RUN_S
        while job.running and process_state(job.pid) != "T":
            assert time.monotonic() < deadline_s, "the job hangs"
            time.sleep(0.02)
        if job.running or job.wait(1.0) != 0:
            job.kill_and_resume()
            assert job.wait(_RUN_S) == 0
    finally:
        job.end()
    assert flag.exists(), f"{name} was never reached"
    return audit(read_ledger(folder / "run" / "ledger"))
