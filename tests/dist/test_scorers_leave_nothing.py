"""What a scorer of the user's has started ends with the job, also when the job is killed and cannot see it coming."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import is_alive, marked_processes, wait_until

MARK = "LLAMARL_TEST_MARK"
SCORER = """
import os, subprocess, time

def score(completion, answer, prompt):
    if not os.path.exists({pids!r}):  # tried before the job starts
        open({pids!r}, "w").close()
        return 0.0
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open({pids!r}, "a") as file:
        file.write(f"{{program.pid}}\\n")
    time.sleep(60)
"""


@pytest.mark.parametrize("engine", ["local", "inline"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_programs_that_a_scorer_started_end_with_the_job(tmp_path: Path, engine: str, number: signal.Signals) -> None:
    pids, scorer = tmp_path / "pids", tmp_path / "scorer.py"
    scorer.write_text(SCORER.format(pids=str(pids)))
    train = [sys.executable, "-m", "llamarl.cli", "train", "--run", str(tmp_path / "run"), "--quiet"]
    settings = [f"engine={engine}", f"reward.scorer={scorer}:score", "reward.timeout_s=120", "reward.workers=2"]
    small = ["schedule.groups_per_update=4", "schedule.samples_per_group=4", "generator.slots=16", "evaluate.prompts=0"]
    job = subprocess.Popen([*train, *settings, *small], env={**os.environ, MARK: str(tmp_path)}, start_new_session=True)
    try:
        assert wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), 120)
        started = [int(pid) for pid in pids.read_text().split()]
        os.kill(job.pid, number)
        if number == signal.SIGTERM:
            os.kill(job.pid, signal.SIGINT)
            os.kill(job.pid, signal.SIGINT)
        assert wait_until(lambda: not any(map(is_alive, started)), 60)
        assert wait_until(lambda: not marked_processes(f"{MARK}={tmp_path}"), 60)
    finally:
        job.kill()
        job.wait()
        for pid in marked_processes(f"{MARK}={tmp_path}"):
            os.kill(pid, signal.SIGKILL)


def test_processes_leave_no_maps_for_profilers_behind(tmp_path: Path) -> None:
    """torch's oneDNN writes /tmp/perf-PID.map unless it is told not to."""
    train = [
        sys.executable,
        "-m",
        "llamarl.cli",
        "train",
        "--run",
        str(tmp_path / "run"),
        "--quiet",
    ]
    small = ["schedule.updates=2", "schedule.groups_per_update=2", "schedule.samples_per_group=2", "generator.slots=4"]
    before = set(Path("/tmp").glob("perf-*.map"))
    subprocess.run([*train, *small, "evaluate.prompts=4"], check=True)
    assert set(Path("/tmp").glob("perf-*.map")) <= before
