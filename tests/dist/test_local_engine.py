"""The local engine under attack: whatever an executor, the nursery or the user does, the job goes on or ends cleanly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import hostile
from helpers.processes import is_alive, marked_processes, num_descriptors, wait_until, watching_listeners

from llamarl import Job
from llamarl.build import Builder, builder_reference
from llamarl.config import Config
from llamarl.configfile import load_config
from llamarl.controller.ledger import Audit, audit, read_ledger
from llamarl.controller.line import Line
from llamarl.engine.engine import Arrival, Death
from llamarl.engine import supervision
from llamarl.engine.envelope import encode
from llamarl.engine.local import engine as engine_module
from llamarl.engine.local.engine import LocalEngine
from llamarl.engine.local.frames import BadFrame, FrameReader, encode_frame
from llamarl.engine.forking import READY
from llamarl.engine.local.wire import Obituary
from llamarl.engine.supervision import Backoff
from llamarl.errors import JobFailed
from llamarl.controller.default_line import default_line
from llamarl.messages import PublishWeights, Up
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


@pytest.fixture(scope="module", autouse=True)
def restarts_without_delay() -> Iterator[None]:
    """Executors die here many times in a row; how long they would have to wait is a test of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "_MAX_BACKOFF_S", 0.0)
        yield


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
        events = map(json.loads, (self.folder / "events").read_text().splitlines())
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
    roles = [msgspec.structs.replace(role, ranks=2) if role.name == "reward" else role for role in standard.roles]
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
    events = map(json.loads, (paired_run.folder / "events").read_text().splitlines())
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


# The end of a job, by failure or by force


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


# The engine itself, without a job


class Bench:
    """An engine with executors that do nothing, and what they have said."""

    def __init__(self, folder: Path) -> None:
        config = load_config(None, [*TINY, "engine.frame_s=0.5"])
        builders = {
            "generator": builder_reference("generator", hostile.idle_executor),
            "reward": builder_reference("reward", hostile.idle_executor),
            "trainer": builder_reference("trainer", hostile.failing_executor),
        }
        self.engine = LocalEngine(config, default_line(config), builders, {}, folder / "logs")
        self.heard: list[Arrival | Death] = []
        self._incarnation = 0

    def raise_child(self, executor: str = "reward/0") -> int:
        """A fresh executor; returns its pid."""
        self._incarnation += 1
        self.engine.spawn(executor, self._incarnation, None)
        up = Arrival(executor, self._incarnation, Up())
        assert self.until(lambda: up in self.heard, 20), "the executor did not come up"
        return self.engine._ranks[executor, 0].pid

    def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            self.heard.extend(self.engine.events())
        return True

    def death(self, timeout_s: float = 3) -> str:
        """Why the newest executor died."""
        found: list[str] = []

        def heard_of() -> bool:
            found[:] = [
                one.reason for one in self.heard if isinstance(one, Death) and one.incarnation == self._incarnation
            ]
            return bool(found)

        assert self.until(heard_of, timeout_s), "no death was noticed"
        return found[0]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    try:
        yield bench
    finally:
        bench.engine.stop()


def test_the_death_of_a_child_is_an_event_within_a_second_and_names_the_signal(bench: Bench) -> None:
    os.kill(bench.raise_child(), signal.SIGKILL)
    assert bench.death(timeout_s=1) == "killed by SIGKILL"


def test_last_words_are_heard_even_when_a_message_finds_the_executor_dead(bench: Bench) -> None:
    child = bench.raise_child("trainer/0")
    bench.engine.send("trainer/0", PublishWeights(0))
    assert wait_until(lambda: not is_alive(child), 3)  # its report lies unread
    bench.engine.send("trainer/0", PublishWeights(1))
    assert bench.death() == "ValueError: no PublishWeights for me"


@pytest.mark.parametrize(
    ("data", "report"),
    [
        (b"this is not a frame", "the engine sent garbage instead of a frame"),
        (encode_frame(b"\xc1"), "the engine sent something that is no message: MessagePack data is malformed"),
        (encode_frame(b"1234")[:-1], "the engine sent a frame that took more than 0.5 s"),
    ],
)
def test_a_child_that_is_sent_garbage_says_so_and_ends(bench: Bench, data: bytes, report: str) -> None:
    bench.raise_child()
    bench.engine._ranks["reward/0", 0].connection.sendall(data)
    assert bench.death().startswith(report)


def test_the_nursery_ignores_what_is_no_order_and_closes_the_descriptors_that_came_with_it(bench: Bench) -> None:
    bench.raise_child()
    nursery = bench.engine._nursery.pid
    before = len(os.listdir(f"/proc/{nursery}/fd"))
    for order in (b"garbage", b"\xc1", b"", b"\x00" * 100_000, encode({"type": "Kill"})):
        socket.send_fds(bench.engine._control, [order], [0, 1, 2])
    bench.raise_child("generator/0")
    assert bench.engine._nursery.pid == nursery
    assert len(os.listdir(f"/proc/{nursery}/fd")) == before


def test_the_nursery_has_one_thread_so_that_it_may_be_forked(bench: Bench) -> None:
    bench.raise_child()
    assert len(os.listdir(f"/proc/{bench.engine._nursery.pid}/task")) == 1


def test_the_death_of_the_nursery_is_the_death_of_its_children_and_a_new_one_takes_its_place(bench: Bench) -> None:
    child = bench.raise_child()
    bench.engine._nursery.kill()
    assert bench.death() == "the process that starts executors died"
    assert wait_until(lambda: not is_alive(child), 1)
    bench.raise_child()


def test_the_engine_ignores_news_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test plays the nursery."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(engine_module, "start_nursery", lambda: (ours, process))
    bench = Bench(tmp_path)
    try:
        bench.engine.spawn("reward/0", 7, None)
        for news in (READY, b"garbage", b"\xc1", encode([1, 2]), encode(Obituary("nobody/9", 7, 0, "a stranger"))):
            theirs.send(news)
        theirs.send(encode(Obituary("reward/0", 7, 0, "the truth")))
        assert bench.until(lambda: bool(bench.heard), 2)
        assert bench.heard == [Death("reward/0", 7, "the truth")]
    finally:
        process.kill()
        bench.engine.stop()
        theirs.close()


def test_stopping_before_the_nursery_is_ready_is_quick_and_leaves_nothing(tmp_path: Path) -> None:
    before = num_descriptors()
    bench = Bench(tmp_path)
    bench.engine.spawn("reward/0", 0, None)
    started_s = time.monotonic()
    bench.engine.stop()
    assert time.monotonic() - started_s < 1
    assert num_descriptors() == before


def test_who_dies_at_once_waits_longer_each_time_and_who_lived_a_while_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "_MAX_BACKOFF_S", 1.0)
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    backoff, delays = Backoff(), []
    for lived_s in (0.0, 0.01, 0.01, 0.01, 0.01, 0.01, 60.0, 0.01):
        now_s += lived_s
        delays.append(backoff.delay_s("reward/0"))
        now_s += delays[-1]
    assert delays == [0, 0.1, 0.2, 0.4, 0.8, 1.0, 0, 0.1]
    assert backoff.delay_s("trainer/0") == 0


# Frames


def test_a_reader_cuts_any_stream_into_the_frames_that_were_sent() -> None:
    payloads = [b"", b"one", bytes(100_000), b"last"]
    stream = b"".join(map(encode_frame, payloads))
    for size in (1, 7, 65_536, len(stream)):
        reader = FrameReader()
        pieces = (stream[at : at + size] for at in range(0, len(stream), size))
        assert [payload for piece in pieces for payload in reader.feed(piece)] == payloads
        assert reader.incomplete_since_s is None


def test_an_oversized_header_is_refused_before_any_memory_is_taken() -> None:
    header = encode_frame(b"")[:8] + (2**63).to_bytes(8, "little")
    reader = FrameReader()
    assert peak_bytes(lambda: refuse(reader, [header])) < 10_000


def test_a_frame_that_lies_about_its_bytes_takes_no_more_memory_than_its_length() -> None:
    length, piece = 100_000_000, bytes(1_000_000)
    header = encode_frame(b"")[:8] + length.to_bytes(8, "little")
    reader = FrameReader(max_bytes=length)
    assert peak_bytes(lambda: refuse(reader, [header, *[piece] * 100])) < 1.3 * length


def refuse(reader: FrameReader, pieces: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        for piece in pieces:
            reader.feed(piece)


def peak_bytes(action: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
