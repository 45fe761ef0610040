"""The Monarch engine on one machine: what it shares with `local`, seen from outside: names of deaths, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers import hostile
from helpers.killing import TINY
from helpers.processes import is_alive, marked_processes, wait_until, watching_listeners

from llamarl import Job, __version__
from llamarl.builders.context import Builder
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.controller.line import Line
from llamarl.observe.event_log import event_file, read_events
from llamarl.observe.summary import Summary

pytestmark = pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: make test-monarch")

MARK = "LLAMARL_TEST_MARK"
TEMPORARY = Path(tempfile.gettempdir())
SMALL = [
    *TINY,
    "engine=monarch",
    "schedule.updates=3",
    "trainer.warmup_updates=0",
    "evaluate.prompts=0",
    "schedule.max_restarts=9",
    "schedule.max_attempts=99",
    "engine.silence_s=3",
]
SAID = {
    "raises": "ValueError: two lines made one",
    "exits": "exited with code 3",
    "killed": "killed by SIGKILL",
    "stopped": "silent for 3 s with work to do",
}
PLAN = {
    "generator/0": ["raises", "killed"],
    "reward/0": ["exits", "raises"],
    "trainer/0": ["killed", "stopped"],
}
BUILDERS: dict[str, Builder] = {
    "generator": hostile.misbehaving_generator,
    "reward": hostile.misbehaving_reward,
    "trainer": hostile.misbehaving_trainer,
}


def deaths(folder: Path, executor: str) -> list[str]:
    events = map(json.loads, read_events(event_file(folder, 0)))
    return [event["reason"] for event in events if event["event"] == "Died" and event["executor"] == executor]


def run(
    folder: Path, config: Config, builders: dict[str, Builder], plan: dict[str, list[str]], line: Line | None = None
) -> tuple[Summary, set[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(folder))
        patch.setenv(hostile.PLAN_FOLDER, str(folder / "plan"))
        hostile.write_plan(folder / "plan", plan)
        with watching_listeners(f"{MARK}={folder}") as listened_on:
            summary = Job(config, line=line, builders=builders).run(folder / "run")
    return summary, listened_on


def test_every_death_is_named_and_nothing_is_lost_or_left_behind(tmp_path: Path) -> None:
    before = set(TEMPORARY.iterdir())
    summary, listened_on = run(tmp_path, load_config(None, SMALL), BUILDERS, PLAN)
    assert summary.outcome == "finished"
    assert summary.restarts == sum(map(len, PLAN.values()))
    found = audit(read_ledger(tmp_path / "run" / "ledger"))
    assert found.clean and found.rewinds == len(PLAN["trainer/0"])
    for executor, deeds in PLAN.items():
        assert deaths(tmp_path / "run", executor) == [SAID[deed] for deed in deeds], executor
    assert wait_until(lambda: not marked_processes(f"{MARK}={tmp_path}") - {os.getpid()}, 60), "a process is left"
    left = {path.name for path in set(TEMPORARY.iterdir()) - before}
    assert not [name for name in left if name.startswith("llamarl-")]
    assert {one.partition(" ")[0] for one in listened_on} <= {"unix"}, "on one machine nothing but Unix sockets"


def test_the_death_of_one_rank_is_the_death_of_the_executor(tmp_path: Path) -> None:
    line = default_line(load_config(None, SMALL))
    from msgspec.structs import replace

    roles = [replace(role, ranks=2) if role.name == "reward" else role for role in line.roles]
    config = load_config(None, SMALL)
    summary, _ = run(
        tmp_path,
        config,
        {"reward": hostile.paired_reward},
        {"reward/0-rank1": ["killed"]},
        Line(roles, line.channels),
    )
    assert summary.outcome == "finished"
    assert deaths(tmp_path / "run", "reward/0") == ["rank 1: killed by SIGKILL"]


def test_a_reader_that_keeps_its_lease_is_killed(tmp_path: Path) -> None:
    config = load_config(
        None, [*SMALL, "engine.silence_s=60", "weights.lease_s=1", "generator.replicas=2", "schedule.updates=30"]
    )
    builders: dict[str, Builder] = {"generator": hostile.generator_that_may_keep_its_lease}
    summary, _ = run(tmp_path, config, builders, {"generator/0": ["keeps_lease"]})
    assert summary.outcome == "finished"
    assert deaths(tmp_path / "run", "generator/0") == ["kept a weight slot for over 1 s"]


def test_a_rank_that_pauses_within_its_limit_is_not_replaced(tmp_path: Path) -> None:
    """Also not by Monarch, which has limits of its own: `engine.silence_s` alone decides."""
    config = load_config(None, [*SMALL, "engine.silence_s=100"])
    summary, _ = run(tmp_path, config, {"trainer": hostile.misbehaving_trainer}, {"trainer/0": ["paused"]})
    assert summary.outcome == "finished" and summary.wall_s > hostile.PAUSE_S
    assert deaths(tmp_path / "run", "trainer/0") == [] and summary.restarts == 0


@pytest.mark.parametrize("victim", ["worker", "fork_server"])
def test_the_worker_or_its_fork_server_is_killed_and_replaced(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that it runs. A pulse of its agent that comes after its death does not pass for one of the next agent."""
    from llamarl.engine.monarch.client import Pulse
    from llamarl.engine.monarch.engine import MonarchEngine

    lose_host = MonarchEngine._lose_host

    def lose_before_a_last_pulse(engine: MonarchEngine, host: Any, reason: str) -> None:
        lose_host(engine, host, reason)
        engine._hear_pulse(Pulse(host.name, host.attempt, __version__, time.monotonic()))

    monkeypatch.setattr(MonarchEngine, "_lose_host", lose_before_a_last_pulse)
    config = load_config(None, [*SMALL, "schedule.updates=40", "engine.host_s=3", "snapshots.every=5"])
    mark = f"{MARK}={tmp_path}"

    def kill() -> None:
        ledger = tmp_path / "run" / "ledger"
        assert wait_until(lambda: ledger.is_dir() and sum(p.stat().st_size for p in ledger.iterdir()) > 2000, 120)
        for pid in marked_processes(mark):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if f"llamarl.engine.monarch.{victim}".encode() in command:
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    summary, _ = run(tmp_path, config, {}, {})
    killer.join()
    assert summary.outcome == "finished" and summary.restarts >= 3
    found = audit(read_ledger(tmp_path / "run" / "ledger"))
    assert found.clean and found.trained == 40 * 4


def test_all_dies_with_the_main_process(tmp_path: Path) -> None:
    from helpers.outside import RunningJob

    mark = f"{MARK}={tmp_path}"
    job = RunningJob(tmp_path / "run", [*SMALL, "schedule.updates=500"], environment=dict([mark.split("=", 1)]))
    try:
        assert wait_until(lambda: list((tmp_path / "run").glob("logs/trainer-0.log")), 120)
        time.sleep(1)
        children = marked_processes(mark) - {job.pid}
        assert len(children) > 5
    finally:
        job.end()
    assert wait_until(lambda: not any(map(is_alive, children)), 60), "a child outlived the job"
