"""Sandboxes for tests: which walls this machine supports, and programs run behind them in a separate process.

python -m helpers.sandboxes WALLS < [[name, program, tests], ...]      (JSON in, {name: reward or null} out)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from llamarl.config import SandboxConfig
from llamarl.tasks.programs import Examiner
from llamarl.tasks.sandbox.interpreter import find_interpreter
from llamarl.tasks.sandbox.probe import features
from llamarl.tasks.sandbox.run import Sandbox, SandboxError
from llamarl.tasks.sandbox.walls import Walls

BRIEF = SandboxConfig(wall_s=2.0, cpu_s=1.0, memory_mb=64, file_mb=4, output_kb=16, processes=8)
SYSTEM_PYTHON = "/usr/bin/python3"  # an interpreter that an unprivileged user can read, wherever ours is installed
_FOLDERS = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
_ENV = {**os.environ, "PYTHONPATH": ":".join(_FOLDERS)}
Case = tuple[str, str, str]  # name, program, tests


def score_under(walls: Walls, cases: list[Case]) -> dict[str, float | None]:
    """Score each program under these walls; None if the sandbox itself failed."""
    done = subprocess.run(
        [sys.executable, "-m", "helpers.sandboxes", walls.name],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env=_ENV,
    )
    found: dict[str, float | None] = json.loads(done.stdout)
    return found


@cache
def _refusal() -> str:
    """The reason why jobs cannot run programs here; empty if they can."""
    code = (
        "from llamarl.config import SandboxConfig\nfrom llamarl.tasks.sandbox.probe import open_sandbox\n"
        "open_sandbox(SandboxConfig())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=_ENV, check=False
    )
    reason = done.stderr.strip().splitlines()[-1] if done.returncode else ""
    assert not reason or "sandbox: " in reason, "a mistake in this test must not look like a machine without a sandbox"
    return reason


def skip_without_sandbox() -> None:
    if reason := _refusal():
        pytest.skip(reason)


@cache
def works(walls: Walls) -> bool:
    """Whether this machine supports these walls; which walls a job takes is up to the probe."""
    if features().landlock < 3 or not Path(SYSTEM_PYTHON).exists() or (walls is Walls.ROOT and os.geteuid() != 0):
        return False
    return score_under(walls, [("first", "print(1)", '[{"output": "1"}]')])["first"] == 1.0


def main() -> None:
    sandbox = Sandbox(Walls[sys.argv[1]], find_interpreter(SYSTEM_PYTHON), BRIEF)
    examiner = Examiner(sandbox, BRIEF, share=False)
    found: dict[str, float | None] = {}
    for name, program, tests in json.load(sys.stdin):
        try:
            found[name] = examiner.score(program, tests, "")
        except SandboxError:
            found[name] = None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
