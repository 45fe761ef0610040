"""Workers that join a running job: who is let in, under which names, what they are told, and what is refused beforehand."""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import suppress

import pytest
from helpers.cli import llamarl
from helpers.joining import PATIENCE_S, FakeWorker, joinable_job
from helpers.processes import wait_until

from llamarl.config.file import load_config
from llamarl.engine.monarch.install import check_engine
from llamarl.engine.monarch.join_client import JoinClient, check_join, leaving_on_signals
from llamarl.engine.monarch.join_listener import JoinListener
from llamarl.engine.monarch.join_protocol import (
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    LeaveGranted,
    LeaveRequest,
)
from llamarl.errors import ConfigError, InputError, JobFailed


def test_a_host_gets_names_when_it_is_reached_and_the_same_ones_when_it_comes_again() -> None:
    with joinable_job("generator.replicas=2") as found:
        one, other = FakeWorker(found), FakeWorker(found)
        one.offer("127.0.0.1:11", replicas=2)
        other.offer("127.0.0.1:12")
        assert found.reach("127.0.0.1:12") == ["generator/2"], "named in the order in which they are reached"
        assert found.reach("127.0.0.1:11") == ["generator/3", "generator/4"]
        assert found.hosts.welcome(found.hosts.host_of("generator/3")) == [], "only once"
        assert one.hear() == JoinAccepted(("generator/3", "generator/4"))
        one.connection.send(LeaveRequest())
        found.until(lambda: found.left)
        assert one.hear() == LeaveGranted() and one.is_cut_off()
        assert found.left == [("127.0.0.1:11", ["generator/3", "generator/4"], "announced")]
        assert found.hosts.host_of("generator/3") is None and found.hosts.host_of("generator/2") is not None
        again = FakeWorker(found)
        again.offer("127.0.0.1:11", worker="second", replicas=1)
        assert found.reach("127.0.0.1:11") == ["generator/3"]


def test_a_broken_connection_is_no_leave_but_another_start_of_the_worker_is() -> None:
    with joinable_job() as found:
        worker = FakeWorker(found)
        worker.offer("127.0.0.1:11")
        assert found.reach("127.0.0.1:11") == ["generator/1"]
        worker.connection.close()
        same = FakeWorker(found)
        same.offer("127.0.0.1:11")
        found.until(lambda: True)
        assert wait_until(lambda: found.hosts.advance() or same.connection.receive(), PATIENCE_S)
        assert not found.left
        second = FakeWorker(found)
        second.offer("127.0.0.1:11", worker="second")
        found.until(lambda: found.left)
        assert found.left == [("127.0.0.1:11", ["generator/1"], "its worker was started again")]
        assert same.is_cut_off()


def test_a_worker_that_goes_before_it_was_reached_is_forgotten() -> None:
    with joinable_job() as found:
        worker = FakeWorker(found)
        worker.offer("127.0.0.1:11")
        found.until(lambda: found.hosts.hosts)
        worker.connection.close()
        found.until(lambda: not found.hosts.hosts)
        assert found.left == [("127.0.0.1:11", [], "its worker is gone")]


@pytest.mark.parametrize(
    ("settings", "gpus", "asked", "replicas"),
    [
        ([], 0, 0, 1),  # a host without GPUs brings one
        ([], 8, 0, 8),
        (["generator.tensor=4"], 8, 0, 2),
        (["generator.tensor=4"], 8, 1, 1),
        (["generator.tensor=4", "engine.share_gpus=true"], 1, 0, 1),
        (["generator.device=cpu"], 8, 0, 1),
        (["generator.device=cpu"], 8, 3, 3),
    ],
)
def test_a_host_brings_as_many_generators_as_its_gpus_allow(
    settings: list[str], gpus: int, asked: int, replicas: int
) -> None:
    with joinable_job(*settings) as found:
        worker = FakeWorker(found)
        worker.offer("127.0.0.1:11", gpus=gpus, replicas=asked)
        assert len(found.reach("127.0.0.1:11")) == replicas


@pytest.mark.parametrize(
    ("address", "gpus", "said"),
    [
        ("127.0.0.1:1", 1, "among engine.hosts"),
        ("127.0.0.1:11", 2, r"it has 2 GPUs, and a generator takes 4 \(generator.tensor\)"),
        ("nowhere", 4, "expected HOST:PORT"),
        ("10.0.0.2:11", 4, "beyond this machine"),
    ],
)
def test_a_host_that_cannot_help_is_told_why_and_not_kept(address: str, gpus: int, said: str) -> None:
    with joinable_job("generator.tensor=4") as found:
        worker = FakeWorker(found)
        worker.offer(address, gpus=gpus)
        heard = worker.hear(of=found)
        assert isinstance(heard, JoinRefused) and re.search(said, heard.reason)
        assert worker.is_cut_off() and not found.hosts.hosts


def test_another_version_of_llamarl_is_refused_and_the_worker_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llamarl.engine.monarch.join_client.__version__", "0.0.1")
    with joinable_job() as found:
        client = JoinClient(found.address, "", listen="127.0.0.1:11", count_gpus=int, replicas=0)
        refused: list[str] = []

        def run() -> None:
            try:
                client.run()
            except JobFailed as error:
                refused.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        found.until(lambda: refused)
        assert re.search(r"does not want this host: it has llamarl 0.0.1, the job .*; install the same", refused[0])
        thread.join()


def test_a_worker_waits_for_its_job_joins_it_and_joins_the_next_one_by_itself() -> None:
    with joinable_job() as first:
        client = JoinClient(first.address, "", listen="127.0.0.1:11", count_gpus=int, replicas=0)
        thread = threading.Thread(target=client.run)
        thread.start()
        assert first.reach("127.0.0.1:11") == ["generator/1"]
    listener = JoinListener(first.address, "")  # the job is resumed at the same address
    assert wait_until(lambda: any(isinstance(one.message, JoinRequest) for one in listener.heard()), PATIENCE_S)
    client.leave()
    assert wait_until(lambda: any(isinstance(one.message, LeaveRequest) for one in listener.heard()), PATIENCE_S)
    listener.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_sigterm_announces_the_leave() -> None:
    client = JoinClient("127.0.0.1:1", "", listen="127.0.0.1:11", count_gpus=int, replicas=0)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with leaving_on_signals(client):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            client.run()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("garbage", [b"hello\n", b'{"type":"JoinRequest"}\n', b"x" * 20_000])
def test_garbage_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
    with joinable_job() as found:
        bad = FakeWorker(found)
        with suppress(OSError):
            bad.connection._socket.sendall(garbage)
        assert bad.is_cut_off()
        good = FakeWorker(found)
        good.offer("127.0.0.1:11")
        assert found.reach("127.0.0.1:11") == ["generator/1"]


# What is refused before anything starts


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["engine.join=127.0.0.1:5"], "engine.join: cannot take effect on one machine; set engine=monarch"),
        (["engine=monarch", "engine.join=127.0.0.1:5"], "engine.join: needs engine.hosts"),
        (["engine=monarch", "engine.hosts=[127.0.0.1:1]", "engine.join=10.0.0.1:5"], "is beyond this machine"),
        (
            ["engine=monarch", "engine.hosts=[10.0.0.1:1]", "engine.join=0.0.0.0:5", "engine.certs=c"],
            "not all of its addresses",
        ),
        (["engine.join=nowhere"], "engine.join"),
        (["generator.replicas=0"], "generator.replicas: 0 generators, and none can join; set engine.join"),
        (["engine.join=127.0.0.1:5", "schedule.deterministic=true"], "not covered by schedule.deterministic"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_engine(load_config(None, settings).engine)


def test_weights_for_hosts_that_join_need_a_trusted_network() -> None:
    from llamarl.builders.weights import weight_transport

    settings = ["engine=monarch", "engine.hosts=[10.0.0.1:1]", "engine.certs=c", "engine.join=10.0.0.1:5"]
    with pytest.raises(ConfigError, match=r"trusted_network: weights would go from 10.0.0.1 to hosts that join"):
        weight_transport(load_config(None, settings), {})
    assert weight_transport(load_config(None, [*settings, "engine.trusted_network=eth0"]), {}) == "group"


def test_a_port_that_is_taken_is_named() -> None:
    with joinable_job() as found, pytest.raises(ConfigError, match=f"engine.join: cannot listen on {found.address}"):
        JoinListener(found.address, "")


def test_a_worker_that_could_not_be_reached_is_refused() -> None:
    with pytest.raises(InputError, match=r"--listen: 127.0.0.1:11 can be reached from this machine only"):
        check_join("127.0.0.1:11", "10.0.0.1:5", "certs")
    done = llamarl("worker", "--listen", "127.0.0.1:11", "--join", "10.0.0.1:5")
    assert done.code == 2 and "--join: 10.0.0.1:5 is beyond this machine" in done.err
    done = llamarl("worker", "--listen", "127.0.0.1:11", "--replicas", "2")
    assert done.code == 2 and "--replicas: cannot take effect without --join" in done.err
