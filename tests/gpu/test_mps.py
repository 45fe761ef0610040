"""A job whose generator and trainer share a GPU by MPS: it is applied, it is noticed where it is not, and nothing stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from llamarl.config.file import load_config
from llamarl.engine.local.mps import MpsDaemon, executor_variables
from llamarl.engine.local.mps_process import PROGRAM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"no {PROGRAM}"),
]
JOB = [sys.executable, "-m", "llamarl", "train", "engine.mps=on", "trainer.compile='off'", "evaluate.prompts=0"]
JOIN = """
import os, sys, torch
from llamarl.engine.local.mps import not_joined
os.environ["CUDA_MPS_PIPE_DIRECTORY"] = sys.argv[1]
torch.ones(1, device="cuda")
sys.exit(not_joined() or 0)
"""


PRODUCTS = """
import sys, torch
from llamarl.engine.local.mps_products import first_wrong
from llamarl.model_spec import SHAPES
print(torch.cuda.get_device_properties(0).multi_processor_count)
print(first_wrong(SHAPES["qwen2.5-1.5b"], torch.device("cuda", 0)))
"""


def left_behind() -> list[str]:
    found = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    alive = [line for line in found if ("cuda-mps" in line or "mps_process" in line) and not line.startswith("Z")]
    return alive + [str(folder) for folder in Path(tempfile.gettempdir()).glob("llamarl-mps-*")]


def joined(folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", JOIN, folder], capture_output=True, text=True, check=False)


def test_a_process_that_joins_uses_it_and_one_that_finds_no_daemon_fails(tmp_path: Path) -> None:
    daemon = MpsDaemon(tmp_path / "mps.log")
    try:
        assert joined(daemon.folder).returncode == 0
        assert "NEW CLIENT" in (tmp_path / "mps.log").read_text()
    finally:
        daemon.stop()
    assert left_behind() == []
    alone = joined(str(tmp_path))
    assert alone.returncode == 1 and "engine.mps: CUDA started without it" in alone.stderr


@pytest.mark.parametrize("visible", ["", "0"])
def test_a_job_trains_with_it_and_leaves_nothing(visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    done = subprocess.run(
        [*JOB, "schedule.updates=3", "--run", str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "side by side" in done.stdout
    clients = (tmp_path / "run" / "logs" / "mps.log").read_text().count("NEW CLIENT")
    assert clients >= 2, "generator and trainer"
    assert left_behind() == []


def test_a_job_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "run" / "logs" / "mps.log"
    with subprocess.Popen([*JOB, "--run", str(tmp_path / "run")], stdout=subprocess.DEVNULL) as job:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (log.exists() and "ACTIVE" in log.read_text()):
            time.sleep(0.2)
        assert "ACTIVE" in log.read_text() and left_behind()
        job.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and left_behind():
        time.sleep(0.2)
    assert left_behind() == []


@pytest.mark.parametrize("share", [0.5, 0.62])
def test_a_trainer_computes_on_its_share_and_products_that_are_wrong_there_are_found(
    share: float, tmp_path: Path
) -> None:
    """On an H200 with CUDA 13.0, a quarter of some results is wrong on 80 multiprocessors."""
    daemon = MpsDaemon(tmp_path / "mps.log")
    config = load_config(None, ["engine.mps=on", f"engine.mps_trainer_share={share}"])
    given = executor_variables(config, {"generator": 0, "trainer": 0}, "trainer/0", daemon.environment)
    try:
        command, environment = [sys.executable, "-c", PRODUCTS], {**os.environ, **given}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    finally:
        daemon.stop()
    number, wrong = done.stdout.split("\n")[:2]
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    assert share * whole - 4 < int(number) <= share * whole + 2
    if (whole, torch.version.cuda) == (132, "13.0"):
        assert bool(wrong) == (share == 0.62)
