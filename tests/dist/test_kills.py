"""Real kill -9s and SIGSTOPs, on every role and in every state; on the job itself; and SIGTERM. Nothing is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import ENGINE
from helpers.killing import TINY
from helpers.processes import wait_until
from helpers.striking import IDLE, Deed, Killer, disturbed

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import Trained, read_ledger
from llamarl.controller.ledger_state import Audit, audit
from llamarl.messages import (
    LoadWeights,
    Message,
    PublishWeights,
    SaveState,
    WorkOnBatch,
    WorkOnGroup,
)
from llamarl.model.checkpoint import load_model
from llamarl.observe.summary import Summary

SEED = 20
SILENCE_S = 1.5
PATIENCE_S = 4.0  # a state that does not come about within this time is not waited for
RECOVERY_S = 30.0  # far longer than on a machine that has nothing else to do
STATES: dict[str, tuple[type[Message] | str, ...]] = {
    "generator/0": (IDLE, WorkOnGroup, LoadWeights),
    "reward/0": (IDLE, WorkOnGroup),
    "trainer/0": (IDLE, WorkOnBatch, PublishWeights, SaveState),
}


def plan(seed: int) -> list[Deed]:
    """Every state of every role is met by a kill; stops, which take longer to be noticed, are spread over them."""
    chance = random.Random(seed)
    places = [(executor, state) for executor, states in STATES.items() for state in states]
    killed = [*places, *chance.sample(places, 5)]
    stopped = chance.sample([place for place in places if place[1] != IDLE], 6)
    deeds = [Deed(*place, signal.SIGKILL, chance.random() * 0.02) for place in killed]
    deeds += [Deed(*place, signal.SIGSTOP, chance.random() * 0.02) for place in stopped]
    chance.shuffle(deeds)
    return deeds


@dataclass(frozen=True)
class Disturbed:
    deeds: list[Deed]
    summary: Summary
    folder: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbed]:
    folder = tmp_path_factory.mktemp("kills") / "run"
    settings = [
        *TINY,
        f"engine={ENGINE}",
        "schedule.updates=90",
        "schedule.max_restarts=9",
        "schedule.max_attempts=99",
        "snapshots.every=3",
        "evaluate.prompts=16",
        f"engine.silence_s={SILENCE_S}",
    ]
    killer = Killer(plan(SEED), PATIENCE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamarl.jobs.engines.engine_class", lambda kind: disturbed(killer))
        summary = Job(load_config(None, settings)).run(folder)
    for timer in killer.timers:
        timer.join()
    yield Disturbed(list(killer.deeds), summary, folder)


def test_twenty_kills_and_stops_over_all_roles_and_states_and_the_run_ends(run: Disturbed) -> None:
    done = [deed for deed in run.deeds if deed.recovered_s is not None]
    assert len(done) == len(run.deeds) == 20, "the job ended before everything was done to it"
    met = {(deed.executor, deed.state) for deed in done if deed.in_state}
    assert len(met) >= 8, "most states were really met"
    assert {executor for executor, _ in met} == set(STATES)
    assert run.summary.outcome == "finished"
    assert run.summary.restarts >= 20


def test_after_twenty_kills_every_group_is_accounted_for_and_the_weights_are_finite(run: Disturbed) -> None:
    found = audit(read_ledger(run.folder / "ledger"))
    assert found.clean, found
    assert (found.trained, found.updates, found.dropped) == (90 * 4, 90, {})
    assert found.rewinds >= 5
    model = load_model(run.folder / run.summary.policy, device=torch.device("cpu"))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_killed_generator_works_again_within_three_seconds(run: Disturbed) -> None:
    kills = [deed for deed in run.deeds if deed.executor == "generator/0" and deed.number == signal.SIGKILL]
    times = [deed.recovered_s for deed in kills]
    print("generator back after", ", ".join(f"{taken:.2f} s" for taken in times if taken is not None))
    assert times and all(taken is not None and taken < RECOVERY_S for taken in times), times


# The job itself, from the outside

ENDLESS = [*TINY, f"engine={ENGINE}", "schedule.updates=60", "snapshots.every=5", "evaluate.prompts=16"]


def start(folder: Path, *args: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llamarl.cli", "train", "--run", str(folder), "--quiet", *map(str, args)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def updates(folder: Path) -> int:
    with suppress(Exception):  # being written
        return 1 + max(record.update for record in read_ledger(folder / "ledger") if isinstance(record, Trained))
    return 0


def ended(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[int, str]:
    _, said = process.communicate(timeout=timeout_s)
    return process.returncode, said.decode()


def full_audit(folder: Path) -> Audit:
    return audit(read_ledger(folder / "ledger"))


def test_the_job_is_killed_resumed_asked_to_stop_and_resumed_to_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = start(folder, *ENDLESS)
    assert wait_until(lambda: updates(folder) >= 12, 150), "the job does not get on"
    killed.kill()
    killed.communicate()
    assert not full_audit(folder).closed

    stopped = start(folder, "--resume")
    before = updates(folder)
    assert wait_until(lambda: updates(folder) >= before + 8 or stopped.poll() is not None, 150)
    asked_s = time.monotonic()
    stopped.send_signal(signal.SIGTERM)
    assert ended(stopped, 10) == (0, "")
    assert time.monotonic() - asked_s < 10
    found = full_audit(folder)
    assert found.closed.startswith("stopped on request after update")
    version = int(found.closed.rsplit(" ", 1)[1])
    assert before <= version < 60 and (folder / "snapshots" / str(version) / "manifest.json").exists()

    resumed = start(folder, "--resume")
    assert ended(resumed, 60) == (0, "")
    found = full_audit(folder)
    assert found.clean and found.trained == 60 * 4 and found.closed == "finished"


def test_a_run_that_has_ended_cannot_be_resumed_into_something_else(tmp_path: Path) -> None:
    settings: list[Any] = [
        *TINY,
        "engine=inline",
        "schedule.updates=2",
        "trainer.warmup_updates=0",
        "evaluate.prompts=0",
    ]
    Job(load_config(None, settings)).run(tmp_path / "run")
    weights = tmp_path / "run" / "snapshots" / "2" / "policy" / "model.safetensors"
    before = weights.read_bytes()
    assert Job.resume(tmp_path / "run").outcome == "finished"
    assert weights.read_bytes() == before
    assert full_audit(tmp_path / "run").clean
