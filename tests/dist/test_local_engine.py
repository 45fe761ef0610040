"""The local engine under attack: whatever an executor, the fork server or the user does, the job goes on or ends cleanly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from helpers import hostile
from helpers.processes import marked_processes, num_descriptors, watching_listeners

from llamarl import Job
from llamarl.builders.context import Builder
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import Audit, audit
from llamarl.controller.line import Line
from llamarl.errors import JobFailed
from llamarl.observe.event_log import event_file, read_events
from llamarl.observe.summary import Summary

MARK = "LLAMARL_TEST_MARK"
LOOPBACK = {"tcp 0100007F", "tcp6 00000000000000000000000001000000"}
TINY = [
    "schedule.updates=3",
    "schedule.groups_per_update=4",
    "schedule.samples_per_group=4",
    "generator.slots=16",
    "generator.threads=1",
    "trainer.threads=1",
    "trainer.warmup_updates=0",
    "evaluate.prompts=0",
    "algo.zero_variance=skip",
]
SYNCHRONOUS = [*TINY, "schedule.max_staleness=0", "placement=colocated"]


pytestmark = pytest.mark.usefixtures("restarts_without_delay")


@dataclass(frozen=True)
class Run:
    folder: Path
    summary: Summary
    descriptors: tuple[int, int]  # of this process, before and after
    listened_on: set[str]
    left: set[int]  # processes of the run that outlived it

    @property
    def audit(self) -> Audit:
        return audit(read_ledger(self.folder / "ledger"))

    @property
    def policy(self) -> bytes:
        return (self.folder / self.summary.policy / "model.safetensors").read_bytes()

    def deaths(self, executor: str) -> list[str]:
        events = map(json.loads, read_events(event_file(self.folder, 0)))
        return [event["reason"] for event in events if event["event"] == "Died" and event["executor"] == executor]


def run_with_plan(
    folder: Path,
    config: Config,
    plan: Mapping[str, list[str]],
    builders: Mapping[str, Builder],
    line: Line | None = None,
) -> Run:
    mark = f"{MARK}={folder}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*mark.split("=", 1))
        patch.setenv(hostile.PLAN_FOLDER, str(folder / "plan"))
        hostile.write_plan(folder / "plan", plan)
        before = num_descriptors()
        with watching_listeners(mark) as listened_on:
            summary = Job(config, line=line, builders=builders).run(folder / "run")
    return Run(folder / "run", summary, (before, num_descriptors()), listened_on, marked_processes(mark))


# One run in which every executor breaks every rule, one life after the other

SAID = {
    "garbage": "sent garbage instead of a frame",
    "truncated": "exited with code 0",
    "oversized": "sent a frame of 9223372036854775808 bytes; the limit is 1073741824",
    "flipped": "sent a frame whose checksum does not match",
    "nonsense": "sent something that is no report: Expected `array`, got `object`",
    "slow": "sent a frame that took more than 0.5 s",
    "hangs_up": "hung up",
    "raises": "ValueError: two lines made one",
    "exits": "exited with code 3",
    "killed": "killed by SIGKILL",
    "stopped": "silent for 2 s with work to do",
    "never_up": "did not start within 2 s",
}
BAD_FRAMES = ["garbage", "truncated", "oversized", "flipped", "nonsense", "slow"]
PLAN = {
    "generator/0": [*BAD_FRAMES, "hangs_up"],
    "reward/0": ["never_up", *BAD_FRAMES, "raises"],
    "trainer/0": [*BAD_FRAMES, "exits", "killed", "stopped"],
}


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    patience = ["schedule.max_restarts=9", "schedule.max_attempts=99"]
    deadlines = ["engine.frame_s=0.5", "engine.silence_s=2", "engine.start_s=2"]
    builders = {
        "generator": hostile.misbehaving_generator,
        "reward": hostile.misbehaving_reward,
        "trainer": hostile.misbehaving_trainer,
    }
    config = load_config(None, [*SYNCHRONOUS, *patience, *deadlines])
    return run_with_plan(tmp_path_factory.mktemp("hostile"), config, PLAN, builders)


@pytest.mark.parametrize("executor", PLAN)
def test_bad_frames_and_deaths_are_named_and_end_one_executor_which_restarts(hostile_run: Run, executor: str) -> None:
    assert hostile_run.deaths(executor) == [SAID[deed] for deed in PLAN[executor]]


def test_a_job_finishes_and_accounts_for_every_group_after_many_deaths(hostile_run: Run) -> None:
    assert hostile_run.summary.outcome == "finished"
    assert hostile_run.summary.restarts == sum(map(len, PLAN.values()))
    assert hostile_run.audit.clean
    assert hostile_run.audit.rewinds == len(PLAN["trainer/0"])


def test_a_trainer_killed_in_mid_run_makes_the_weights_of_an_undisturbed_one(hostile_run: Run, tmp_path: Path) -> None:
    undisturbed = Job(load_config(None, [*SYNCHRONOUS, "engine=inline"])).run(tmp_path)
    assert undisturbed.tokens_trained == hostile_run.summary.tokens_trained > 0, "there must be something to learn"
    assert (tmp_path / undisturbed.policy / "model.safetensors").read_bytes() == hostile_run.policy


def test_the_traceback_of_an_exception_lies_in_the_executors_log(hostile_run: Run) -> None:
    log = (hostile_run.folder / "logs" / "reward-0.log").read_text()
    assert log.startswith("Traceback") and "in fail" in log and "ValueError: two lines\nmade one" in log


def test_nothing_listens_anywhere(hostile_run: Run) -> None:
    assert hostile_run.listened_on == set()


def test_a_run_leaves_no_process_and_no_descriptor(hostile_run: Run) -> None:
    assert hostile_run.left == set()
    assert hostile_run.descriptors[0] == hostile_run.descriptors[1]


# An executor of two ranks; and a reader that stops with a weight slot in its hands


@pytest.fixture(scope="module")
def paired_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = load_config(None, [*TINY, "generator.replicas=2", "weights.lease_s=0.5"])
    standard = default_line(config)
    # One group at a time: reports of groups that come together go out together, and what a death keeps back is done again.
    paired = {"ranks": 2, "capacity": config.schedule.samples_per_group}
    roles = [msgspec.structs.replace(role, **paired) if role.name == "reward" else role for role in standard.roles]
    plan = {"reward/0-rank1": ["killed"], "generator/1": ["keeps_lease"]}
    builders = {"reward": hostile.paired_reward, "generator": hostile.generator_that_may_keep_its_lease}
    folder = tmp_path_factory.mktemp("paired")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        return run_with_plan(folder, config, plan, builders, Line(roles, standard.channels))


def test_the_death_of_one_rank_is_the_death_of_the_executor_and_all_its_ranks_restart(paired_run: Run) -> None:
    assert paired_run.deaths("reward/0") == ["rank 1: killed by SIGKILL"]
    assert [len(diaries(paired_run, rank)) for rank in (0, 1)] == [2, 2]
    assert paired_run.audit.clean


def test_messages_reach_all_ranks_in_the_same_order(paired_run: Run) -> None:
    assert diaries(paired_run, 0)[-1] == diaries(paired_run, 1)[-1]
    assert sorted(ordinal for diary in diaries(paired_run, 0) for ordinal in diary) == list(range(12))


def test_only_rank_0_reports(paired_run: Run) -> None:
    events = map(json.loads, read_events(event_file(paired_run.folder, 0)))
    scored = [event["ordinal"] for event in events if event["event"] == "GroupDone" and event["executor"] == "reward/0"]
    assert sorted(scored) == list(range(12))


def test_the_ranks_of_an_executor_listen_on_loopback_only_and_leave_no_file(paired_run: Run) -> None:
    assert paired_run.listened_on <= LOOPBACK
    assert paired_run.listened_on, "the ranks met over gloo, so this test must have seen it listen"
    assert sorted(path.name for path in paired_run.folder.parent.iterdir()) == ["plan", "run"]


def test_a_reader_that_stops_with_a_lease_is_declared_dead_and_the_job_goes_on(paired_run: Run) -> None:
    assert paired_run.deaths("generator/1") == ["kept a weight slot for over 0.5 s"]
    assert paired_run.summary.outcome == "finished"
    assert paired_run.left == set()


def diaries(run: Run, rank: int) -> list[list[int]]:
    """What a rank wrote down in each of its lives, the last one last."""
    paths = (run.folder.parent / "plan").glob(f"reward-0-rank{rank}.*.diary")
    return [[int(line) for line in path.read_text().split()] for path in sorted(paths, key=lambda p: p.stat().st_mtime)]


# The end of a job, by failure


def test_a_failed_job_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv(hostile.PLAN_FOLDER, str(tmp_path / "plan"))
    hostile.write_plan(tmp_path / "plan", {"reward/0": ["raises"]})
    job = Job(load_config(None, [*TINY, "schedule.max_restarts=0"]), builders={"reward": hostile.misbehaving_reward})
    before = num_descriptors()
    with pytest.raises(JobFailed, match=r"^reward/0 died .*: ValueError: two lines made one$"):
        job.run(tmp_path / "run")
    assert num_descriptors() == before
    assert marked_processes(f"{MARK}={tmp_path}") == set()
