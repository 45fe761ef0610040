"""Hosts that join a running job and leave it, announced or not: the job never stops, and nothing is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.cluster import Cluster, ClusterHost
from helpers.cluster_job import HOST_S, NOTICED_S, STAGE_S, UPDATES, check_nothing_lost, config_for, executors_on, run
from helpers.pace import DAMAGED, paced_generator, perhaps_damaged_generator
from helpers.processes import wait_until

from llamarl import Job
from llamarl.config import Config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.observe.rows import read_rows

if TYPE_CHECKING:
    from helpers.witness import Witness

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: make test-cluster"),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
PORT = 2701


@pytest.fixture
def hosts(namespaces: Cluster) -> Iterator[Cluster]:
    """Three hosts, of which the first has a worker that the settings name."""
    namespaces.hosts[0].start()
    yield namespaces
    for host in namespaces.hosts:
        host.kill()


def join_of(found: Cluster) -> str:
    return f"{found.own}:{PORT}"


def config_with_join(found: Cluster, *settings: str) -> Config:
    home = found.hosts[0]
    return config_for(found, [{"address": home.address}], f"engine.join={join_of(found)}", *settings)


def stays_of(folder: Path, executor: str) -> list[dict[str, object]]:
    rows = read_rows(folder / "timings.jsonl")
    return [row for row in rows if row.get("executor") == executor and ("joined" in row or "left" in row)]


def kill(host: ClusterHost, witness: Witness, executor: str) -> None:
    killed_s = time.monotonic()
    host.kill()
    taken_s, reason = witness.until_left(executor, killed_s)
    print(f"killed host: left after {taken_s:.1f} s: {reason}")
    assert taken_s < NOTICED_S


def test_one_host_joins_and_leaves_announced_another_joins_and_is_killed(hosts: Cluster, tmp_path: Path) -> None:
    _, second, third = hosts.hosts

    def deeds(witness: Witness) -> None:
        joined_s = time.monotonic()
        second.start(join=join_of(hosts))
        witness.until_works("generator/1", joined_s)
        print(f"joined: at work after {time.monotonic() - joined_s:.1f} s")
        assert witness.host_of("generator/1") == second.address
        witness.until_groups("generator/1", 3)

        left_s = time.monotonic()
        assert second.leave() == 0
        taken_s, reason = witness.until_left("generator/1", left_s)
        print(f"announced: left after {taken_s:.1f} s, its worker ended after {time.monotonic() - left_s:.1f} s")
        assert reason == "announced" and wait_until(lambda: not executors_on(second), HOST_S)
        witness.until_updates(2)

        third.start(join=join_of(hosts))
        witness.until_works("generator/2", left_s)
        witness.until_groups("generator/2", 3)
        kill(third, witness, "generator/2")
        witness.until_updates(2)

    summary, witness = run(hosts, config_with_join(hosts), tmp_path / "run", deeds)
    check_nothing_lost(tmp_path / "run", summary)
    assert not witness.deaths("trainer/0") and not witness.deaths("generator/0") and summary.restarts == 0
    for executor, reason in (("generator/1", "announced"), ("generator/2", "silent")):
        came, left = stays_of(tmp_path / "run", executor)
        assert came["joined"] and reason in str(left["left"]) and int(str(left["groups"])) > 0


def test_a_job_without_generators_waits_for_hosts_and_one_that_thaws_joins_again(
    hosts: Cluster, tmp_path: Path
) -> None:
    _, second, third = hosts.hosts
    second.start(join=join_of(hosts))

    def deeds(witness: Witness) -> None:
        assert witness.host_of("generator/0") == second.address
        frozen_s = time.monotonic()
        second.freeze()
        taken_s, reason = witness.until_left("generator/0", frozen_s)
        print(f"frozen host: left after {taken_s:.1f} s: {reason}")
        assert taken_s < NOTICED_S and "silent" in reason
        time.sleep(1.0)
        updates = witness.updates()
        time.sleep(2.0)
        assert witness.updates() == updates, "nobody generates"
        second.thaw()
        thawed_s = time.monotonic()
        witness.until_works("generator/0", thawed_s)
        print(f"thawed: at work after {time.monotonic() - thawed_s:.1f} s")
        witness.until_updates(2)

        cut_s = time.monotonic()
        second.cut_off()
        witness.until_left("generator/0", cut_s)
        third.start(join=join_of(hosts))
        witness.until_works("generator/1", cut_s)
        witness.until_updates(2)
        second.reconnect()
        again_s = time.monotonic()
        witness.until_works("generator/0", again_s)
        print(f"reconnected: at work after {time.monotonic() - again_s:.1f} s")

    config = config_with_join(hosts, "generator.replicas=0")
    summary, witness = run(hosts, config, tmp_path / "run", deeds)
    check_nothing_lost(tmp_path / "run", summary)
    assert not witness.deaths("trainer/0")


def test_damaged_weights_are_noticed_and_their_host_is_sent_away(hosts: Cluster, tmp_path: Path) -> None:
    _, second, _ = hosts.hosts

    def deeds(witness: Witness) -> None:
        second.start(join=join_of(hosts), environment={DAMAGED: "1"})
        assert wait_until(lambda: second.exit_code() is not None, STAGE_S)
        assert second.exit_code() == 3
        assert "does not match its checksum" in second.said
        witness.until_updates(2)

    config = config_with_join(hosts)
    summary, witness = run(hosts, config, tmp_path / "run", deeds, generator=perhaps_damaged_generator)
    check_nothing_lost(tmp_path / "run", summary)
    _, left = stays_of(tmp_path / "run", "generator/1")
    assert "sent away: weights" in str(left["left"]) and left["groups"] == 0, "it never sampled anything"
    assert not witness.deaths("trainer/0")


def test_a_resumed_job_finds_its_guests_again(hosts: Cluster, tmp_path: Path) -> None:
    _, second, _ = hosts.hosts

    def deeds(witness: Witness) -> None:
        joined_s = time.monotonic()
        second.start(join=join_of(hosts))
        witness.until_works("generator/1", joined_s)
        witness.until_updates(1)

    run(hosts, config_with_join(hosts), tmp_path / "run", deeds)
    before = len(stays_of(tmp_path / "run", "generator/1"))
    longer = [f"schedule.updates={3 * UPDATES}"]
    summary = Job.resume(tmp_path / "run", overrides=longer, builders={"generator": paced_generator})
    assert len(stays_of(tmp_path / "run", "generator/1")) > before, "the same worker has joined again by itself"
    ledger = audit(read_ledger(tmp_path / "run" / "ledger"))
    assert ledger.clean and (summary.outcome, ledger.updates) == ("finished", 3 * UPDATES)
