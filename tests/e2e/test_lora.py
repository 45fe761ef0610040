"""Whole jobs with adapters: they learn, resume bit for bit, save PEFT folders, and have a reference for nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fingerprint import fingerprint
from helpers.killing import TINY, CopyAtEach
from helpers.small_model import small_model

from llamarl import LLM, Job, Sampling
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import ConfigError
from llamarl.model.adapter_folder import load_merged, merge
from llamarl.model.checkpoint import load_model

LORA = ["model.lora.rank=4", "trainer.lr=3e-3", "trainer.warmup_updates=0"]
UPDATES = 6
SETTINGS = [
    *TINY,
    *small_model(),
    *LORA,
    "engine=inline",
    f"schedule.updates={UPDATES}",
    "schedule.max_staleness=0",
    "snapshots.every=2",
    "evaluate.prompts=16",
    "evaluate.every=3",
]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_job(folder: Path, *settings: str) -> Path:
    assert Job(load_config(None, [*SETTINGS, *settings])).run(folder).outcome == "finished"
    assert audit(read_ledger(folder / "ledger")).clean
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is never killed, in `straight`, and for each update a copy as a kill at its beginning would leave it."""
    folder = tmp_path_factory.mktemp("runs")
    run = folder / "straight"
    Job(load_config(None, SETTINGS), builders={"trainer": CopyAtEach(run, folder)}).run(run)
    assert len(rows(run)) == UPDATES and all(row["trained_tokens"] for row in rows(run))
    return folder


@pytest.mark.parametrize("cut", range(UPDATES))
def test_killed_at_any_update_and_resumed_equals_never_killed(cut: int, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / str(cut), tmp_path / "run")
    assert Job.resume(tmp_path / "run").updates == UPDATES
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(runs / "straight", UPDATES)


def test_a_snapshot_holds_adapters_only_and_everything_reads_it(runs: Path, tmp_path: Path) -> None:
    run = runs / "straight"
    policy = run / "snapshots" / str(UPDATES) / "policy"
    assert {path.name for path in policy.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert not (policy / "config.json").exists()
    merge(run, tmp_path / "whole")
    sampling = Sampling(samples=4, max_new_tokens=6)
    answers = [LLM(folder, device="cpu").generate(["1+1="], sampling) for folder in (policy, tmp_path / "whole")]
    assert answers[0] == answers[1]
    assert load_model(tmp_path / "whole").shape == load_merged(policy, dtype=torch.float32).shape


def test_training_starts_from_a_folder_of_adapters(runs: Path, tmp_path: Path) -> None:
    policy = runs / "straight" / "snapshots" / str(UPDATES) / "policy"
    again = run_job(tmp_path / "run", f"model.adapter={policy}")
    first, last = (
        [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
        for run in (again, runs / "straight")
    )
    assert first[0]["accuracy"] == last[-1]["accuracy"], "version 0 of the one is the last version of the other"
    with pytest.raises(ConfigError, match=r"model\.adapter: .*: its adapters have rank 4, .*; set model\.lora\.rank=4"):
        Job(load_config(None, [*SETTINGS, f"model.adapter={policy}", "model.lora.rank=8"]))
    with pytest.raises(ConfigError, match=r"model\.adapter: .*nowhere"):
        Job(load_config(None, [*SETTINGS, "model.adapter=nowhere"]))


def test_layers_that_the_model_has_not_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: no layer is named 'wq'; known: q_proj"):
        Job(load_config(None, [*SETTINGS, "model.lora.targets=[wq]"]))


def test_the_base_is_the_reference_and_says_what_a_second_model_says(tmp_path: Path) -> None:
    """`place=trainer` uses the trainer's own base; `place=own` loads a second model. The runs are the same."""
    kl = ["algo.reference_kl=0.5"]
    free = run_job(tmp_path / "free", *kl, "reference.place=trainer")
    own = run_job(tmp_path / "own", *kl, "reference.place=own")
    found = [
        [(row["loss"], row["kl_reference"]) for row in rows(run) if row["role"] == "trainer"] for run in (free, own)
    ]
    for mine, theirs in zip(*found, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-7)
    assert found[0][0][1] == pytest.approx(0.0, abs=1e-7) and found[0][-1][1] > 1e-8


@pytest.mark.parametrize("lora", ["beside", "merged"])
def test_a_job_of_processes_publishes_adapters_only(lora: str, tmp_path: Path) -> None:
    run = run_job(
        tmp_path / "run",
        "engine=local",
        "schedule.max_staleness=1",
        "schedule.probe_every=1",
        f"generator.lora={lora}",
        "trainer.data=2",
    )
    gaps = [row["logprob_gap"] for row in rows(run) if "logprob_gap" in row]
    assert len(gaps) == UPDATES and max(gaps) < 1e-5


def test_deterministic_runs_are_the_same_on_every_engine(tmp_path: Path) -> None:
    """Asynchronous, with probes: the same bytes in one process and in several."""
    exact = ["schedule.deterministic=true", "schedule.max_staleness=1", "schedule.probe_every=2"]
    runs = [run_job(tmp_path / engine, *exact, f"engine={engine}") for engine in ("inline", "local")]
    one, other = (fingerprint(run, UPDATES) for run in runs)
    assert one == other
    assert any("adapter_effect" in row for row in rows(runs[0]))
