"""Whole jobs whose trainer has several ranks, or a reference beside it: they learn, end, and can be gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import ENGINE
from helpers.notes import Notes

from llamarl import Job, Run
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import ConfigError, InputError
from llamarl.model.checkpoint import load_model, random_model, save_model
from llamarl.model.transformer import Transformer
from llamarl.observe.rows import read_rows

SMALL = [
    f"engine={ENGINE}",
    "schedule.updates=4",
    "schedule.groups_per_update=4",
    "schedule.samples_per_group=4",
    "schedule.max_staleness=0",
    "generator.slots=32",
    "generator.threads=1",
    "trainer.threads=1",
    "generator.device=cpu",
    "trainer.device=cpu",
    "evaluate.prompts=0",
    "snapshots.every=2",
]


def rows(run: Path, role: str = "trainer") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["role"] == role]


def run(folder: Path, *settings: str) -> Path:
    summary = Job(load_config(None, [*SMALL, *settings])).run(folder)
    assert (summary.outcome, summary.updates) == ("finished", 4)
    assert audit(read_ledger(folder / "ledger")).clean
    return folder


def test_a_trainer_of_several_ranks_does_what_one_does(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone")
    together = run(tmp_path / "together", "trainer.data=2", "trainer.tensor=2")
    one, other = load_model(alone / "snapshots/4/policy"), load_model(together / "snapshots/4/policy")
    for (name, mine), (_, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=3e-4), name
    for one_row, row in zip(rows(alone), rows(together), strict=True):
        assert one_row["reward"] == pytest.approx(row["reward"], abs=0.2)
        assert row.get("logprob_gap", 0.0) < 1e-4, "what its ranks publish is what they train"
    for folder in (alone, together):
        kept = [rollout for group in Run(folder).rollouts.groups(0) for rollout in group.rollouts]
        trained = [rollout for rollout in kept if rollout.status == "trained"]
        assert trained, "nothing was trained"
        for rollout in trained:  # S = 0: both policies are the same, whichever rank had the rollout
            np.testing.assert_allclose(rollout.policy_logprobs, rollout.behavior_logprobs, atol=1e-3)
    assert any("logprob_gap" in row for row in rows(together))
    lanes = {lane for row in read_rows(together / "spans.jsonl") for lane in row.get("spans", ())}
    assert lanes >= {"trainer/0", *(f"trainer/0 rank {rank}" for rank in (1, 2, 3))}, "every rank has a lane"
    go_on(together, other)


def test_streams_of_several_ranks_are_those_of_one(tmp_path: Path) -> None:
    """Rows of data and a teacher's whole distribution, beside the policy gradient."""
    shape = load_model(Config().model_folder).shape
    save_model(random_model(shape, seed=1), tmp_path / "teacher", carry_from=Config().model_folder)
    streams = ["sft.path=examples/data/additions.jsonl", "sft.share=0.5", "schedule.deterministic=true"]
    streams += [f"teacher.path={tmp_path / 'teacher'}", "teacher.forward=0.3", "trainer.lr=1e-5"]
    alone = run(tmp_path / "alone", *streams)
    together = run(tmp_path / "together", *streams, "trainer.data=2", "trainer.tensor=2")
    for one_row, row in zip(rows(alone), rows(together), strict=True):
        for name in ("loss", "sft_loss", "teacher_kl", "sft_tokens", "teacher_tokens", "trained_tokens"):
            assert row[name] == pytest.approx(one_row[name], rel=2e-3), name
        assert row["teacher_kl"] > 0.1


def test_ranks_of_a_teacher_of_its_own_teach_what_one_does(tmp_path: Path) -> None:
    """Its ranks write their states together; the trainer's read those of their tokens, and have their rows of the head."""
    shape = load_model(Config().model_folder).shape
    save_model(random_model(shape, seed=1), tmp_path / "teacher", carry_from=Config().model_folder)
    taught = [f"teacher.path={tmp_path / 'teacher'}", "teacher.forward=0.3", "trainer.lr=1e-5"]
    alone = run(tmp_path / "alone", *taught, "schedule.deterministic=true")
    own = ["teacher.place=own", "teacher.device=cpu", "teacher.threads=1", "teacher.data=2", "teacher.tensor=2"]
    meshes = ["trainer.data=2", "trainer.tensor=2", "schedule.deterministic=true"]
    together = run(tmp_path / "together", *taught, *own, *meshes)
    for one_row, row in zip(rows(alone), rows(together), strict=True):
        for name in ("loss", "teacher_kl", "teacher_tokens"):
            assert row[name] == pytest.approx(one_row[name], rel=2e-3), name
        assert row["teacher_kl"] > 0.1 and row["teacher_gap_max"] < 1e-3
    assert not (together / "batches").exists()


def test_replicas_of_a_sharded_trainer_do_what_one_rank_does(tmp_path: Path) -> None:
    """They publish and save once, and the run can go on without them. Ranks of a replica share packs."""
    folder = run(
        tmp_path / "replicas",
        "trainer.replicate=2",
        "trainer.context=2",
        "trainer.share_prompts=auto",
        "algo.reference_kl=0.1",
        "reference.place=trainer",
    )
    assert sum(row.get("logprob_gap", 0.0) < 1e-4 for row in rows(folder)) == 4
    assert len(list((folder / "snapshots/4/trainer").glob("*.safetensors"))) == 2
    expected = load_model(folder / "snapshots/4/policy")
    rmtree(folder / "snapshots/4")
    notes = Notes()
    assert (
        Job.resume(folder, overrides=["trainer.replicate=1", "trainer.context=1"], display=notes).outcome == "finished"
    )
    assert "trainer.replicate: 2 so far, 1 from here on" in notes.seen
    again = load_model(folder / "snapshots/4/policy")
    for (name, mine), (_, theirs) in zip(again.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=3e-4), name


def go_on(folder: Path, expected: Transformer) -> None:
    """From the snapshot of version 2, as if the last two updates had never been: on the same mesh, and on others."""
    for mesh in ([], ["trainer.tensor=1"], ["trainer.data=1"]):
        rmtree(folder / "snapshots/4")
        notes = Notes()
        assert Job.resume(folder, overrides=mesh, display=notes).outcome == "finished"
        again = load_model(folder / "snapshots/4/policy")
        for (name, mine), (_, theirs) in zip(again.named_parameters(), expected.named_parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=3e-4), name
        for setting in mesh:
            key, _, value = setting.partition("=")
            assert f"{key}: 2 so far, {value} from here on" in notes.seen


@pytest.mark.parametrize("place", ["own", "trainer"])
def test_a_reference_holds_the_policy_where_it_began(place: str, tmp_path: Path) -> None:
    device = ["reference.device=cpu"] if place == "own" else []
    folder = run(tmp_path / "run", "algo.reference_kl=0.5", f"reference.place={place}", *device)
    kl = [row["kl_reference"] for row in rows(folder) if "kl_reference" in row]
    assert kl[0] == pytest.approx(0.0, abs=1e-6), "the first update starts from the reference itself"
    assert kl[-1] > 1e-7
    assert len(rows(folder, "reference")) == (4 if place == "own" else 0)


def test_several_ranks_in_one_process_are_refused() -> None:
    with pytest.raises(ConfigError, match="engine: inline runs everything in one process"):
        load_config(None, ["engine=inline", "trainer.data=2"])


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("trainer.tensor=3", r"trainer\.tensor: 3 ranks cannot share the model's num_kv_heads=2 evenly"),
        ("reference.model=nowhere", r"reference\.model: .*nowhere"),
        ("reference.tensor=5", r"reference\.tensor: 5 ranks cannot share"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(setting: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Job(load_config(None, [*SMALL, "algo.reference_kl=0.1", setting]))


def test_ranks_that_were_probed_and_had_nothing_to_train_on_can_still_be_saved(tmp_path: Path) -> None:
    """All rewards are equal, so that passes are made forward only, and the snapshot comes right after one."""
    idle = ["schedule.max_staleness=1", "schedule.probe_every=1", "reward.scorer=none", "trainer.data=2"]
    summary = Job(load_config(None, [*SMALL, *idle])).run(tmp_path / "run")
    assert (summary.outcome, summary.restarts) == ("finished", 0)
