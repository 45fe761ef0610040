"""The local engine and its fork server without a job: forks, deaths and nonsense, and what is heard of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import hostile
from helpers.processes import is_alive, num_descriptors, wait_until

from llamarl.builders.registry import builder_reference
from llamarl.config import RewardConfig
from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.engine import supervision
from llamarl.engine.engine import Arrival, Death, EngineEvent
from llamarl.engine.envelope import encode
from llamarl.engine.forking import READY
from llamarl.engine.local import engine as engine_module
from llamarl.engine.local import fork_server
from llamarl.engine.local.engine import LocalEngine
from llamarl.engine.local.fork_server import fork_server_ahead
from llamarl.engine.local.protocol import RankExited
from llamarl.engine.supervision import Backoff
from llamarl.errors import JobFailed
from llamarl.io.frames import encode_frame
from llamarl.messages import PublishWeights, Up
from llamarl.tasks.judge import Judge

pytestmark = pytest.mark.usefixtures("restarts_without_delay")
PATIENCE_S = 120.0  # for what takes a moment, unless the machine is busy with something else


class Bench:
    """An engine with executors that do nothing, and what they have said."""

    def __init__(self, folder: Path) -> None:
        config = load_config(None, ["generator.threads=1", "trainer.threads=1", "engine.frame_s=0.5"])
        builders = {
            "generator": builder_reference("generator", hostile.idle_executor),
            "reward": builder_reference("reward", hostile.idle_executor),
            "trainer": builder_reference("trainer", hostile.failing_executor),
        }
        self.engine = LocalEngine(config, default_line(config), builders, {}, folder / "logs")
        self.heard: list[EngineEvent] = []
        self._incarnation = 0

    def raise_child(self, executor: str = "reward/0") -> int:
        """A fresh executor; returns its pid."""
        self._incarnation += 1
        self.engine.spawn(executor, self._incarnation, None)
        up = Arrival(executor, self._incarnation, Up())
        assert self.until(lambda: up in self.heard), "the executor did not come up"
        return self.engine._ranks[executor, 0].pid

    def until(self, condition: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            self.heard.extend(self.engine.events())
        return True

    def death(self) -> str:
        """Why the newest executor died."""
        found: list[str] = []

        def heard_of() -> bool:
            found[:] = [
                one.reason for one in self.heard if isinstance(one, Death) and one.incarnation == self._incarnation
            ]
            return bool(found)

        assert self.until(heard_of), "no death was noticed"
        return found[0]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    try:
        yield bench
    finally:
        bench.engine.stop()


def test_the_death_of_a_child_is_an_event_and_names_the_signal(bench: Bench) -> None:
    os.kill(bench.raise_child(), signal.SIGKILL)
    assert bench.death() == "killed by SIGKILL"


def test_last_words_are_heard_even_when_a_message_finds_the_executor_dead(bench: Bench) -> None:
    child = bench.raise_child("trainer/0")
    bench.engine.send("trainer/0", PublishWeights(0))
    assert wait_until(lambda: not is_alive(child), PATIENCE_S)  # its report lies unread
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


def test_the_fork_server_ignores_what_is_no_order_and_closes_the_descriptors_that_came_with_it(bench: Bench) -> None:
    bench.raise_child()
    server = bench.engine._fork_server.pid
    before = len(os.listdir(f"/proc/{server}/fd"))
    for order in (b"garbage", b"\xc1", b"", b"\x00" * 100_000, encode({"type": "Kill"})):
        socket.send_fds(bench.engine._control, [order], [0, 1, 2])
    bench.raise_child("generator/0")
    assert bench.engine._fork_server.pid == server
    assert len(os.listdir(f"/proc/{server}/fd")) == before


def test_the_fork_server_has_one_thread_so_that_it_may_be_forked(bench: Bench) -> None:
    bench.raise_child()
    assert len(os.listdir(f"/proc/{bench.engine._fork_server.pid}/task")) == 1


def test_the_death_of_the_fork_server_is_the_death_of_its_children_and_a_new_one_takes_its_place(bench: Bench) -> None:
    child = bench.raise_child()
    bench.engine._fork_server.kill()
    assert bench.death() == "the process that starts executors died"
    assert wait_until(lambda: not is_alive(child), PATIENCE_S)
    bench.raise_child()


def test_the_engine_ignores_news_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test plays the fork server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(engine_module, "start_fork_server", lambda: (ours, process))
    bench = Bench(tmp_path)
    try:
        bench.engine.spawn("reward/0", 7, None)
        for news in (READY, b"garbage", b"\xc1", encode([1, 2]), encode(RankExited("nobody/9", 7, 0, "a stranger"))):
            theirs.send(news)
        theirs.send(encode(RankExited("reward/0", 7, 0, "the truth")))
        assert bench.until(lambda: bool(bench.heard))
        assert bench.heard == [Death("reward/0", 7, "the truth")]
    finally:
        process.kill()
        bench.engine.stop()
        theirs.close()


def test_a_fork_server_that_was_started_ahead_is_the_next_engines(tmp_path: Path) -> None:
    with fork_server_ahead():
        [(_, ahead)] = fork_server._ahead
        first, second = Bench(tmp_path / "first"), Bench(tmp_path / "second")
        try:
            assert first.engine._fork_server is ahead
            assert second.engine._fork_server is not ahead
            first.raise_child()
        finally:
            first.engine.stop()
            second.engine.stop()


def test_a_fork_server_that_was_started_ahead_and_never_needed_is_ended() -> None:
    before = num_descriptors()
    with fork_server_ahead():
        [(_, ahead)] = fork_server._ahead
    assert ahead.poll() is not None
    assert num_descriptors() == before


def test_stopping_before_the_fork_server_is_ready_is_quick_and_leaves_nothing(tmp_path: Path) -> None:
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


def wait_for_another(bench: Bench, before: int) -> None:
    assert bench.until(lambda: bench.engine._fork_server.pid != before)


def test_a_fork_server_that_is_killed_before_it_is_ready_is_replaced_and_orders_wait_for_the_next(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    try:
        for _ in range(2):
            before = bench.engine._fork_server.pid
            bench.engine._fork_server.kill()
            wait_for_another(bench, before)
        bench.raise_child()
    finally:
        bench.engine.stop()


def test_a_fork_server_that_never_comes_up_ends_the_job_after_three_tries(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    try:
        with pytest.raises(JobFailed, match=r"the process that starts executors could not start \(exit code -9\)"):
            for _ in range(3):
                bench.engine._fork_server.kill()
                wait_for_another(bench, bench.engine._fork_server.pid)
    finally:
        bench.engine._fork_server.kill()
        bench.engine._control.close()


@pytest.mark.parametrize("ready", [True, False])
def test_a_fork_server_that_stays_stopped_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    monkeypatch.setattr(engine_module, "_FORK_S", 0.5)
    bench = Bench(tmp_path)
    try:
        if ready:
            bench.raise_child()
        else:
            monkeypatch.setattr(engine_module, "_FORK_SERVER_S", 0.1)
        stopped = bench.engine._fork_server.pid
        os.kill(stopped, signal.SIGSTOP)
        if ready:
            bench.engine.spawn("generator/0", 1, None)
        wait_for_another(bench, stopped)
        monkeypatch.setattr(engine_module, "_FORK_SERVER_S", 60.0)
        if ready:
            assert bench.death() == "the process that starts executors does not answer"
        bench.raise_child("trainer/0")
    finally:
        bench.engine.stop()


def test_files_of_the_working_folder_do_not_hide_pythons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numbers", "select", "array", "json"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'w').close()\nraise SystemExit(9)\n"
        )
    monkeypatch.chdir(tmp_path)
    bench = Bench(tmp_path)
    try:
        bench.raise_child()
    finally:
        bench.engine.stop()
    judge = Judge(RewardConfig(scorer="regex", pattern="x", workers=1))
    try:
        judge.prepare()
    finally:
        judge.close()
    assert not (tmp_path / "executed").exists()
