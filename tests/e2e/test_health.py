"""A loss or gradient that is no number changes nothing, is told, and ends the job when it keeps happening."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.builders import HASH_FILE, hashing_trainer
from helpers.killing import TINY
from helpers.notes import Notes
from helpers.world import World, standard_line

from llamarl import Job
from llamarl.builders.context import BuildContext
from llamarl.builders.trainer import build_trainer
from llamarl.config import ScheduleConfig
from llamarl.config.file import load_config
from llamarl.controller import events as ev
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import JobFailed
from llamarl.executors.executor import Executor
from llamarl.executors.trainer import Trainer

UPDATES = 8
LOSS = """
from itertools import count
from llamarl.algo.losses import aipo_loss

calls = count()

def loss(tokens, algo):
    found, metrics = aipo_loss(tokens, algo)
    if tokens.num_tokens == 9:  # the batch that losses are tried on
        return found, metrics
    return (found {spoil} if next(calls) in {bad} else found), metrics
"""
SPOILS = {"loss and gradient": "* float('nan')", "gradient": "* float('inf')", "loss": "+ float('nan')"}


def job(folder: Path, bad: Collection[int], spoil: str = "* float('nan')", *settings: str) -> Job:
    folder.mkdir(exist_ok=True)
    (folder / "loss.py").write_text(LOSS.format(bad=set(bad) or "()", spoil=spoil))
    chosen = [
        *TINY,
        "engine=inline",
        f"schedule.updates={UPDATES}",
        "trainer.warmup_updates=0",
        "evaluate.prompts=0",
        "algo.zero_variance=keep",
        f"algo.loss={folder / 'loss.py'}:loss",
        *settings,
    ]
    return Job(load_config(None, chosen), builders={"trainer": recording_trainer})


states: list[dict[str, torch.Tensor]] = []


def recording_trainer(context: BuildContext) -> Executor:
    """Remembers weights and optimizer state as they were before every step and after the last."""
    trainer = build_trainer(context)
    assert isinstance(trainer, Trainer)
    step = trainer.learner.step

    def recording(number: int, loss: torch.Tensor | float) -> dict[str, float]:
        metrics = step(number, loss)
        everything = {**dict(trainer.model.named_parameters()), **trainer.optimizer.state_tensors()}
        states.append({name: tensor.detach().clone() for name, tensor in everything.items()})
        return metrics

    trainer.learner.step = recording  # type: ignore[method-assign]
    states.clear()
    return trainer


def changed(update: int) -> bool:
    before, after = states[update - 1], states[update]
    return any(not torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_spoilt_update_leaves_weights_and_optimizer_bit_for_bit_and_names_its_groups(
    tmp_path: Path, spoil: str
) -> None:
    notes = Notes()
    summary = job(tmp_path, {2, 3, 6}, spoil).run(tmp_path / "run", display=notes)
    assert [changed(update) for update in range(1, UPDATES)] == [True, False, False, True, True, False, True]
    assert summary.skipped == 3
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1, 0, 0, 1, 0]
    said = [note for note in notes.seen if "skipped" in note]
    assert said == [
        f"trainer/0 skipped update {update}: loss or gradient was not a number; weights unchanged; groups {groups}"
        for update, groups in ((2, "8, 9, 10, 11"), (3, "12, 13, 14, 15"), (6, "24, 25, 26, 27"))
    ]
    assert audit(read_ledger(tmp_path / "run" / "ledger")).clean


def test_too_many_in_a_row_stop_the_job_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="trainer/0 skipped 3 updates in a row, 4 to 6: loss or gradient") as failed:
        job(tmp_path, {1, 2, 4, 5, 6}, "* float('nan')", "schedule.max_skipped=3").run(tmp_path / "run")
    assert failed.value.exit_code == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["skipped"] == 5
    assert "skipped 3 updates in a row" in audit(read_ledger(tmp_path / "run" / "ledger")).closed


def world(*, max_restarts: int, max_skipped: int = 5) -> World:
    schedule = ScheduleConfig(
        updates=12, groups_per_update=1, samples_per_group=2, max_restarts=max_restarts, max_skipped=max_skipped
    )
    return World(standard_line(capacity=100), schedule, save_every=4)


def train(world: World, skipped: Collection[int] = ()) -> int:
    """Until the next update is done; returns its number."""
    while True:
        command = world.outstanding[0]
        if isinstance(command, ev.RunBatch):
            world.outstanding.pop(0)
            world.feed(ev.BatchDone(command.executor, command.incarnation, command.update, command.update in skipped))
            return command.update
        world.complete(0)


def test_skipped_updates_that_are_made_again_after_a_rewind_are_not_counted_twice() -> None:
    job = world(max_skipped=4, max_restarts=9)
    for _ in range(3):  # 5, 6 and 7 are bad; the snapshot is of version 4
        while train(job, {5, 6, 7}) < 7:
            pass
        assert job.end is None
        job.kill("trainer/0")
    while train(job, {5, 6, 7, 8}) < 8:
        pass
    assert isinstance(job.end, ev.Abort) and "skipped 4 updates in a row, 5 to 8" in job.end.reason


def test_a_trainer_that_always_dies_at_the_same_update_does_not_go_on_for_ever() -> None:
    """What it makes again on the way there is no progress."""
    job = world(max_restarts=3)
    deaths = 0
    while job.end is None:
        if train(job) == 6:
            job.kill("trainer/0")
            deaths += 1
        assert deaths < 10, "an endless loop"
    assert deaths == 4 and isinstance(job.end, ev.Abort)


def test_hashing_trainers_see_the_same_weights_after_a_skipped_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HASH_FILE, str(tmp_path / "hashes"))
    spoilt = job(tmp_path, {3})
    Job(spoilt.config, builders={"trainer": hashing_trainer}).run(tmp_path / "run")
    hashes = (tmp_path / "hashes").read_text().split()
    assert [one == other for one, other in pairwise(hashes)].count(True) == 1
    assert hashes[2] == hashes[3]
