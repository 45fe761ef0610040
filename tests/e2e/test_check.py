"""`llamarl check` agrees with what then happens: jobs that it says fit run to their end, and the others do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.cli import llamarl
from helpers.limits import few_files, small_disk, small_memory

SHORT = [
    "schedule.updates=2",
    "schedule.groups_per_update=4",
    "schedule.samples_per_group=2",
    "generator.slots=16",
    "generator.device=cpu",
    "trainer.device=cpu",
    "evaluate.prompts=0",
    "snapshots.every=1",
    "snapshots.keep=1",
]
INLINE = [*SHORT, "engine=inline"]


def here(settings: Sequence[str], run: Path) -> tuple[int, int, str]:
    """Exit codes of `check` and of `train`, and what `check` said; in this process."""
    checked = llamarl("check", *settings, "--run", run)
    return checked.code, llamarl("train", *settings, "--run", run, "--quiet").code, checked.out


def under(limit: Sequence[str], settings: Sequence[str], run: Path) -> tuple[int, int, str]:
    """The same in processes of their own, under a limit."""
    checked, trained = (
        subprocess.run(
            [*limit, sys.executable, "-m", "llamarl", verb, *settings, "--run", str(run)],
            capture_output=True,
            text=True,
            check=False,
        )
        for verb in ("check", "train")
    )
    return checked.returncode, trained.returncode, checked.stdout


@pytest.mark.parametrize(
    "settings",
    [
        INLINE,
        [*INLINE, "algo.reference_kl=0.1"],
        [*INLINE, "schedule.max_staleness=2"],
        [*SHORT, "generator.replicas=2"],
    ],
    ids=["inline", "reference", "stale", "replicas"],
)
def test_jobs_that_fit_run(settings: list[str], tmp_path: Path) -> None:
    checked, trained, said = here(settings, tmp_path / "run")
    assert (checked, trained) == (0, 0), said
    assert said.splitlines()[-1] == "fine"


def test_a_job_that_fits_a_small_disk_runs(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 40) as disk:
        checked, trained, said = here(INLINE, disk / "run")
    assert (checked, trained) == (0, 0), said


def test_a_job_that_fits_few_open_files_runs(tmp_path: Path) -> None:
    checked, trained, said = under(few_files(72), SHORT, tmp_path / "run")
    assert (checked, trained) == (0, 0), said


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("generator.slots=10000000", "fits memory"),
        ("trainer.device=cuda:99", "settings"),
        ("model.path=/no", "settings"),
    ],
)
def test_jobs_that_train_refuses_do_not_fit(setting: str, what: str, tmp_path: Path) -> None:
    checked, trained, said = here([*INLINE, setting], tmp_path / "run")
    assert (checked, trained) == (1, 2), said
    assert any(line.startswith(f"problem  {what}") for line in said.splitlines()), said


def test_a_job_does_not_fit_into_a_folder_that_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checked, trained, said = here(INLINE, tmp_path)
    assert (checked, trained) == (1, 2), said


def test_a_job_does_not_fit_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 6) as disk:
        checked, trained, said = here(INLINE, disk / "run")
    assert (checked, trained) == (1, 3), said
    assert "problem  fits disk    DOES NOT FIT: a snapshot takes 12 MiB" in said


def test_a_job_does_not_fit_too_few_open_files(tmp_path: Path) -> None:
    checked, trained, said = under(few_files(32), SHORT, tmp_path / "run")
    assert (checked, trained) == (1, 3), said
    assert "problem  fits files   DOES NOT FIT" in said


@pytest.mark.skipif(torch.version.cuda is not None, reason="importing a CUDA build takes more than this")
def test_a_job_does_not_fit_too_little_memory(tmp_path: Path) -> None:
    with small_memory(380) as limit:
        checked, trained, said = under(limit, SHORT, tmp_path / "run")
    assert checked == 1 and trained != 0, said
    assert "problem  fits memory  DOES NOT FIT" in said
