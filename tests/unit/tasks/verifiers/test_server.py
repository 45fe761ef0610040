"""The environment server is watched: whatever happens to it, it is started again at its address, and nobody waits for it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.brief import ROOT

from llamarl.config import TaskConfig
from llamarl.errors import ConfigError
from llamarl.tasks.verifiers.server import EnvironmentServer
from llamarl.tasks.verifiers.tasks import read_tasks

pytest.importorskip("zmq")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "data" / "stand_ins"), prepend=":")


def settings(**more: Any) -> TaskConfig:
    return TaskConfig(**{"kind": "verifiers", "env": "sums", "env_python": sys.executable, **more})


def until(true: Callable[[], bool]) -> None:
    late_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < late_s
        time.sleep(0.01)


def test_a_killed_server_is_started_again_at_its_address_and_says_why() -> None:
    server = EnvironmentServer(settings(), timeout_s=240)
    address, pid = server.wait_until_up(), server.pid
    assert server.is_up and server.take_notes() == []
    os.kill(pid, signal.SIGKILL)
    until(lambda: server.is_up and server.pid != pid)
    assert server.wait_until_up() == address
    assert server.take_notes() == ["the environment server has died (killed by SIGKILL); it is started again"]
    assert server.take_notes() == []
    server.close()
    until(lambda: not server.is_up)


def test_a_server_that_hangs_is_killed_and_started_again() -> None:
    server = EnvironmentServer(settings(), timeout_s=2)
    server.wait_until_up()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: server.is_up and server.pid != pid)
    assert server.take_notes()[0] == "the environment server said nothing for 0.5 s; it is started again"
    server.close()


def test_a_server_that_does_not_start_says_why() -> None:
    server = EnvironmentServer(settings(env="nosuch"), timeout_s=240)
    with pytest.raises(ConfigError, match=r"^task.env: the server of nosuch does not start: .*'nosuch' not found$"):
        server.wait_until_up()


def test_a_server_that_cannot_be_started_again_is_given_up_with_the_reason(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    server = EnvironmentServer(settings(env_config={"fault": "starts once", "flag": str(flag)}), timeout_s=240)
    server.wait_until_up()
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: bool(server.failure))
    assert server.failure == "task.env: the server of sums does not start: OSError: this starts once"
    assert not server.is_up


def test_the_server_ends_with_its_handle() -> None:
    server = EnvironmentServer(settings(), timeout_s=240)
    server.wait_until_up()
    pid = server.pid
    del server
    gc.collect()
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_the_sides_of_tasks_do_not_hang_on_their_prompts_alone() -> None:
    found = read_tasks(settings(held_out=0.5, env_config={"one_prompt": True}))
    assert found.train and found.held_out
    assert {one.question for one in [*found.train, *found.held_out]} == {"1+1="}
    with pytest.raises(ConfigError, match=r"has no tasks to train on; task.held_out has taken all of them"):
        read_tasks(settings(held_out=0.99, size=1))
