"""Ranks of NCCL groups die, or stop, in the middle of whatever they do. Nobody waits for ever, nothing is lost."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from helpers.striking import Deed, Killer, disturbed

from llamarl import Job
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.messages import LoadWeights, Message, PublishWeights, SaveState, WorkOnBatch, WorkOnGroup

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
SILENCE_S = 8.0
TRAINER, GENERATOR = "trainer/0", "generator/0"
MESH = ["engine.share_gpus=true", "trainer.data=2", "trainer.tensor=2", "generator.tensor=2", "trainer.compile='off'"]
PLANNED: list[tuple[str, type[Message], signal.Signals, int | None]] = [
    (TRAINER, WorkOnBatch, KILL, 1),
    (GENERATOR, WorkOnGroup, KILL, 1),
    (GENERATOR, WorkOnGroup, STOP, 1),
    (TRAINER, WorkOnBatch, STOP, 3),
    (GENERATOR, LoadWeights, KILL, 0),
    (GENERATOR, LoadWeights, STOP, 1),
    (TRAINER, PublishWeights, KILL, 2),
    (TRAINER, SaveState, KILL, 0),
    (TRAINER, WorkOnBatch, KILL, None),
    (GENERATOR, WorkOnGroup, KILL, None),
]
STATES: dict[str, tuple[int, tuple[type[Message], ...]]] = {
    TRAINER: (4, (WorkOnBatch, PublishWeights, SaveState)),
    GENERATOR: (2, (WorkOnGroup, LoadWeights)),
}


def deeds(seed: int, count: int) -> list[Deed]:
    """One of each kind, then random ones."""
    chance = random.Random(seed)
    found = [Deed(who, state, number, 0.05 * chance.random(), rank) for who, state, number, rank in PLANNED]
    while len(found) < count:
        who = chance.choice(sorted(STATES))
        ranks, states = STATES[who]
        found.append(Deed(who, chance.choice(states), KILL, 0.2 * chance.random(), chance.randrange(ranks)))
    return found


@pytest.mark.timeout(580)
def test_twenty_deaths_of_ranks_and_the_default_job_learns_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [
        *MESH,
        f"engine.silence_s={SILENCE_S}",
        "schedule.max_restarts=9",
        "schedule.max_attempts=99",
        "snapshots.every=5",
    ]
    killer = Killer(deeds(seed=28, count=20), patience_s=10)
    monkeypatch.setattr("llamarl.jobs.engines.engine_class", lambda kind: disturbed(killer))
    try:
        summary = Job(load_config(None, settings)).run(tmp_path / "run")
    finally:
        print(*killer.deeds, sep="\n")
    for timer in killer.timers:
        timer.join()
    found = audit(read_ledger(tmp_path / "run" / "ledger"))
    print(f"accuracy {summary.eval_before} -> {summary.eval_after}, restarts {summary.restarts}, {found}")
    assert summary.outcome == "finished" and found.clean
    assert found.updates == Config().schedule.updates and found.dropped == {}
    assert all(deed.recovered_s is not None for deed in killer.deeds), "the job ended before everything was done to it"
    late = [
        str(deed)
        for deed in killer.deeds
        if (deed.noticed_s or 1e9) > SILENCE_S + 2 or (deed.recovered_s or 1e9) > (deed.noticed_s or 0.0) + SILENCE_S
    ]
    assert not late
    assert summary.eval_after is not None and summary.eval_after > 0.85
