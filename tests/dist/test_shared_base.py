"""Trainer, generator and reference hold one base together, also after each of them was killed and came back."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.killing import TINY
from helpers.outside import RunningJob, executors
from helpers.processes import wait_until

from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.model.base import BaseLayout
from llamarl.model.hf_config import read_shape
from llamarl.weights.shared_memory import HOST_NAME

NAMES = ("trainer-0", "generator-0", "reference-0")
SETTINGS = [
    *TINY,
    "model.lora.rank=4",
    "algo.reference_kl=0.01",
    "reference.place=own",
    "schedule.updates=500",
    "schedule.max_restarts=20",
    "trainer.warmup_updates=0",
    "evaluate.prompts=0",
]
PATIENCE_S = 120.0


@pytest.fixture(params=["auto", "fp8"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningJob]:
    job = RunningJob(tmp_path / "run", [*SETTINGS, f"model.base={request.param}"])
    yield job
    job.end()


def bases(pid: int) -> dict[str, int]:
    """Maps the inode of each base that a process maps to the bytes of it that it has touched."""
    found: dict[str, int] = {}
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text()):
        if HOST_NAME in entry.partition("\n")[0]:
            touched = re.search(r"^Rss: +(\d+) kB", entry, re.MULTILINE)
            found[entry.split()[4]] = 1024 * int(touched[1]) if touched else 0
    return found


def living(job: RunningJob) -> dict[str, int]:
    """The executors that have mapped a base, by name."""
    found = {}
    for name, pid in executors(job.pid).items():
        try:
            if name in NAMES and bases(pid):
                found[name] = pid
        except OSError:
            continue
    return found


def trained(job: RunningJob) -> int:
    ledger = job.folder / "ledger"
    return audit(read_ledger(ledger)).trained if ledger.is_dir() else 0


def test_one_base_is_in_memory_whoever_dies(job: RunningJob) -> None:
    config = load_config(None, SETTINGS)
    assert wait_until(lambda: len(living(job)) == len(NAMES) and trained(job) > 8, PATIENCE_S)
    before = living(job)
    seen = [bases(pid) for pid in before.values()]
    (inode,) = seen[0]
    assert all(one.keys() == {inode} for one in seen), "more than one base"
    wide = BaseLayout(read_shape(config.model_folder), torch.float32).num_bytes
    assert all(0.2 * wide < one[inode] < 1.1 * wide for one in seen), "it is not what they compute with"
    for name in NAMES:
        os.kill(before[name], signal.SIGKILL)
        count = trained(job)
        assert wait_until(lambda: name in living(job) and living(job)[name] != before[name], PATIENCE_S), name  # noqa: B023
        assert wait_until(lambda: trained(job) > count + 8, PATIENCE_S), name  # noqa: B023
        assert all(bases(pid).keys() == {inode} for pid in living(job).values()), f"after the death of {name}"
