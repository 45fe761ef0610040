"""Asynchronous, and yet the same seed gives the same bytes: whatever the timing, the replicas, the engine, the crash."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.engines import ENGINE
from helpers.fingerprint import fingerprint, trained_groups
from helpers.jitter import jittery_generator, jittery_reward, jittery_trainer
from helpers.killing import TINY, KillAt, Killed
from helpers.outside import RunningJob, executors
from helpers.warm import WarmProcess

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import LedgerState, audit
from llamarl.errors import ConfigError
from llamarl.failpoints import VARIABLE

UPDATES = 12


def settings(staleness: int, *more: str) -> list[str]:
    return [
        *TINY,
        f"schedule.updates={UPDATES}",
        f"schedule.max_staleness={staleness}",
        "schedule.deterministic=true",
        "schedule.probe_every=4",
        "snapshots.every=3",
        "evaluate.prompts=16",
        "evaluate.every=5",
        *more,
    ]


@pytest.fixture(scope="module", params=[1, 2], ids=["S=1", "S=2"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("straight") / "run"
    Job(load_config(None, settings(request.param, "engine=inline"))).run(folder)
    return request.param, folder


def test_it_is_really_asynchronous(straight: tuple[int, Path]) -> None:
    """Batch u was sampled by version u - S, all of it; evaluations by the versions that were due."""
    staleness, folder = straight
    rows = trained_groups(LedgerState.of(read_ledger(folder / "ledger")))
    assert len(rows) == 4 * UPDATES
    for _, first, last, _, update in rows:
        assert first == last == max(0, update - staleness)
    evaluated = [json.loads(line)["version"] for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert evaluated == [0, 5, 10, 12]


@pytest.mark.parametrize("replicas", [1, 2])
def test_timing_engine_and_replicas_change_no_byte(straight: tuple[int, Path], replicas: int, tmp_path: Path) -> None:
    staleness, folder = straight
    jittery = {"generator": jittery_generator, "reward": jittery_reward, "trainer": jittery_trainer}
    config = load_config(None, settings(staleness, f"engine={ENGINE}", f"generator.replicas={replicas}"))
    Job(config, builders=jittery).run(tmp_path / "run")
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(folder, UPDATES)


@pytest.mark.parametrize("cut", range(1, 11))
def test_killed_and_resumed_equals_never_killed(straight: tuple[int, Path], cut: int, tmp_path: Path) -> None:
    staleness, folder = straight
    with pytest.raises(Killed):
        Job(load_config(None, settings(staleness, "engine=inline")), builders={"trainer": KillAt(cut)}).run(
            tmp_path / "run"
        )
    Job.resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(folder, UPDATES)


@pytest.mark.parametrize(("seconds", "replicas"), [(0.4, 1), (1.2, 2)])
def test_a_job_killed_from_outside_and_resumed_equals_never_killed(
    straight: tuple[int, Path], seconds: float, replicas: int, tmp_path: Path
) -> None:
    """The whole process, at whatever it was doing; resumed with another number of replicas."""
    staleness, folder = straight
    job = RunningJob(tmp_path / "run", settings(staleness, f"engine={ENGINE}"), start=WarmProcess)
    try:
        ledger = tmp_path / "run" / "ledger"
        while job.running and not (ledger.is_dir() and any(path.stat().st_size for path in ledger.iterdir())):
            time.sleep(0.01)
        time.sleep(seconds)
        job.end()
    finally:
        job.end()
    Job.resume(tmp_path / "run", overrides=[f"generator.replicas={replicas}"])
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(folder, UPDATES)


@pytest.mark.skipif(ENGINE != "local", reason="looks for the processes of the local engine")
def test_a_trainer_that_dies_again_and_again_changes_no_byte(straight: tuple[int, Path], tmp_path: Path) -> None:
    """Metrics too: of updates that are made again there is one row each, in order."""
    staleness, folder = straight
    more = ("engine=local", "schedule.max_restarts=50", "generator.threads=1")
    job = RunningJob(tmp_path / "run", settings(staleness, *more), start=WarmProcess)
    killed, metrics = 0, tmp_path / "run" / "metrics.jsonl"
    try:
        while job.running:
            made = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            trainer = executors(job.pid).get("trainer-0")
            if trainer and made >= 2 + 3 * killed:
                with suppress(ProcessLookupError):
                    os.kill(trainer, signal.SIGKILL)
                killed += 1
            time.sleep(0.01)
        assert job.wait(1) == 0 and killed >= 2
    finally:
        job.end()
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(folder, UPDATES)
    assert audit(read_ledger(tmp_path / "run" / "ledger")).rewinds >= 1


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_job_killed_right_after_a_snapshot_has_all_that_the_snapshot_counts_on(
    straight: tuple[int, Path], nth: int, tmp_path: Path
) -> None:
    staleness, folder = straight
    armed = {VARIABLE: f"snapshot.renamed:kill:{nth}:{tmp_path / 'reached'}"}
    job = RunningJob(tmp_path / "run", settings(staleness, "engine=inline"), environment=armed, start=WarmProcess)
    assert job.wait(60) == -signal.SIGKILL
    Job.resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run", UPDATES) == fingerprint(folder, UPDATES)


def test_the_recorded_events_replay_the_run_and_its_resumption(straight: tuple[int, Path], tmp_path: Path) -> None:
    staleness, folder = straight
    assert not llamarl("replay", folder).code
    with pytest.raises(Killed):
        Job(load_config(None, settings(staleness, "engine=inline")), builders={"trainer": KillAt(7)}).run(
            tmp_path / "run"
        )
    Job.resume(tmp_path / "run", overrides=["generator.replicas=2"])
    done = llamarl("replay", tmp_path / "run")
    assert done.code == 0, done.out
    assert done.out.startswith("2 runs, ")
    log = tmp_path / "run" / "events.1.jsonl.gz"
    lines = gzip.decompress(log.read_bytes()).splitlines(keepends=True)
    forgotten = [line for line in lines if b'"GroupDone"' not in line or b'"ordinal":47,' not in line]
    log.write_bytes(gzip.compress(b"".join(forgotten)))
    done = llamarl("replay", tmp_path / "run")
    assert done.code == 1
    assert "the ledger has" in done.out


def test_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule.window: 2 lets timing choose the batches"):
        load_config(None, ["schedule.deterministic=true", "schedule.window=2"])
