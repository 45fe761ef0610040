"""On a GPU too, `llamarl check` agrees with what then happens: five jobs that fit, and five that do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
SHORT = [
    "schedule.updates=2",
    "schedule.groups_per_update=8",
    "schedule.samples_per_group=4",
    "generator.slots=32",
    "trainer.compile='off'",
    "evaluate.prompts=0",
    "schedule.max_restarts=1",
]


def outcome(settings: list[str], run: Path) -> tuple[int, int, str]:
    """Exit codes of `check` and of `train`, and what both said."""
    checked, trained = (
        subprocess.run(
            [sys.executable, "-m", "llamarl", verb, *SHORT, *settings, "--run", str(run)],
            capture_output=True,
            text=True,
            check=False,
        )
        for verb in ("check", "train")
    )
    return checked.returncode, trained.returncode, checked.stdout + trained.stdout + trained.stderr


@contextmanager
def all_but(num_bytes: int) -> Iterator[None]:
    """Hold the GPU's memory, so that only so much is free."""
    free, _ = torch.cuda.mem_get_info(0)
    held = torch.empty(max(0, free - num_bytes), dtype=torch.uint8, device="cuda:0")
    try:
        yield
    finally:
        del held
        torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["engine=inline"],
        ["generator.replicas=2"],
        ["trainer.offload=true", "generator.kv_pages=200"],
        ["algo.reference_kl=0.1", "generator.dtype=float32"],
    ],
    ids=["default", "inline", "replicas", "offload", "reference"],
)
def test_jobs_that_fit_run(settings: list[str], tmp_path: Path) -> None:
    checked, trained, said = outcome(settings, tmp_path / "run")
    assert (checked, trained) == (0, 0), said


@pytest.mark.parametrize(
    "setting",
    ["generator.kv_pages=100000000", "trainer.device=cuda:99", "trainer.data=99"],
    ids=["cache", "device", "ranks"],
)
def test_jobs_that_train_refuses_do_not_fit(setting: str, tmp_path: Path) -> None:
    checked, trained, said = outcome([setting], tmp_path / "run")
    assert (checked, trained) == (1, 2), said


@pytest.mark.parametrize(("free", "settings"), [(600 << 20, []), (1500 << 20, ["generator.replicas=4"])])
def test_a_job_does_not_fit_a_gpu_that_others_use(free: int, settings: list[str], tmp_path: Path) -> None:
    with all_but(free):
        checked, trained, said = outcome(
            [*settings, "generator.device=cuda:0", "trainer.device=cuda:0"], tmp_path / "run"
        )
    assert checked == 1 and trained != 0, said
    assert "problem  fits cuda:0" in said
