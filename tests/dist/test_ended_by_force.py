"""A job ended by force, from the command line: Ctrl-C, and a kill that it cannot see coming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import ENGINE
from helpers.processes import marked_processes, wait_until

MARK = "LLAMARL_TEST_MARK"
ENDLESS = [
    f"engine={ENGINE}",
    "schedule.updates=1000000",
    "schedule.groups_per_update=4",
    "schedule.samples_per_group=4",
    "generator.slots=16",
    "generator.threads=1",
    "trainer.threads=1",
    "evaluate.prompts=0",
]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Two jobs of the command line, well under way, to be ended in two ways."""
    shared_memory = set(os.listdir("/dev/shm"))
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # where these tests ignore Ctrl-C, a job would too
    jobs = {}
    for name in ("interrupted", "killed"):
        folder = tmp_path / name
        (folder / "tmp").mkdir(parents=True)
        jobs[name] = subprocess.Popen(
            [sys.executable, "-m", "llamarl.cli", "train", *ENDLESS, "--run", str(folder / "run"), "--quiet"],
            env={**environment, MARK: str(folder), "TMPDIR": str(folder / "tmp")},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    try:
        assert wait_until(lambda: all(trained_updates(tmp_path / name / "run") > 1 for name in jobs), 120)
        yield {"jobs": jobs, "shared_memory": shared_memory}
    finally:
        signal.signal(signal.SIGINT, ours)
        for job in jobs.values():
            job.kill()
            job.communicate()


def trained_updates(folder: Path) -> int:
    return sum(segment.read_bytes().count(b'"Trained"') for segment in (folder / "ledger").glob("*"))


def test_ctrl_c_and_kill_9_leave_no_process_no_shared_memory_and_no_file(
    tmp_path: Path, running: dict[str, Any]
) -> None:
    interrupted, killed = running["jobs"]["interrupted"], running["jobs"]["killed"]
    if ENGINE == "local":
        assert len(marked_processes(f"{MARK}={tmp_path / 'killed'}")) == 5  # itself, fork server, three executors
    os.killpg(interrupted.pid, signal.SIGINT)
    os.kill(killed.pid, signal.SIGKILL)
    for name in ("interrupted", "killed"):
        assert all_gone(f"{MARK}={tmp_path / name}", within_s=60)  # a busy machine is slow to end them
        assert not [path for path in (tmp_path / name / "tmp").iterdir() if not is_monarchs_own(path)]
    assert wait_until(lambda: set(os.listdir("/dev/shm")) <= running["shared_memory"], 60)
    run = tmp_path / "interrupted" / "run"
    assert interrupted.wait(3) == 130
    said = interrupted.stderr.read().decode()
    assert said == f"llamarl: interrupted; go on with: llamarl train --run {run} --resume\n"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert (run / "snapshots" / str(summary["updates"])).is_dir(), "all that was trained is in a snapshot"


def is_monarchs_own(path: Path) -> bool:
    """A folder that Monarch makes in the process of the controller, and can't remove when that is killed."""
    return ENGINE == "monarch" and path.name.startswith(".tmp")


def all_gone(mark: str, within_s: float) -> bool:
    return wait_until(lambda: not marked_processes(mark), within_s)
