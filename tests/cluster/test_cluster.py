"""Jobs over three hosts with mutual TLS: hosts die, freeze, are cut off, come back, join late. Nothing is lost."""

from __future__ import annotations

import os
import socket
import ssl
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.cluster import Cluster
from helpers.cluster_job import (
    GENERATORS,
    HOST_S,
    NOTICED_S,
    STAGE_S,
    check_nothing_lost,
    config_for,
    executors_on,
    run,
)
from helpers.processes import wait_until

from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit

if TYPE_CHECKING:
    from helpers.witness import Witness

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: make test-cluster"),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def until_all_work(witness: Witness) -> None:
    for executor in GENERATORS:
        witness.until_works(executor, 0.0)


def test_one_host_is_killed_and_one_is_cut_off_and_both_come_back(hosts: Cluster, tmp_path: Path) -> None:
    home, one, other = hosts.hosts
    places: list[dict[str, object]] = [
        {"address": home.address, "roles": ["trainer", "reward"]},
        {"address": one.address, "ranks": 1, "roles": ["generator"]},
        {"address": other.address, "ranks": 1, "roles": ["generator"]},
    ]

    def deeds(witness: Witness) -> None:
        until_all_work(witness)
        first, second = (
            next(name for name in GENERATORS if witness.host_of(name) == host.address) for host in (one, other)
        )
        killed_s = time.monotonic()
        one.kill()
        taken_s, reason = witness.until_dead(first, killed_s)
        print(f"killed host: noticed after {taken_s:.1f} s: {reason}")
        assert taken_s < NOTICED_S
        witness.until_updates(3)
        assert not witness.deaths(second), "the job goes on with fewer generators"

        back_s = time.monotonic()
        one.start()
        witness.until_works(first, back_s)
        print(f"started again: at work after {time.monotonic() - back_s:.1f} s")

        cut_s = time.monotonic()
        other.cut_off()
        taken_s, reason = witness.until_dead(second, cut_s)
        print(f"cut off: noticed after {taken_s:.1f} s: {reason}")
        assert taken_s < NOTICED_S and "silent" in reason
        witness.until_updates(3)
        assert wait_until(lambda: not executors_on(other), 2 * HOST_S), (
            "cut off from the job, a host ends its part of it"
        )

        again_s = time.monotonic()
        other.reconnect()
        witness.until_works(second, again_s)
        print(f"reconnected: at work after {time.monotonic() - again_s:.1f} s")
        witness.until_updates(3)

    config = config_for(hosts, places, "generator.replicas=2")
    summary, witness = run(hosts, config, tmp_path / "run", deeds)
    check_nothing_lost(tmp_path / "run", summary)
    assert len(witness.deaths("trainer/0")) == 0


def test_a_frozen_host_and_the_trainers_own_are_replaced_by_others(hosts: Cluster, tmp_path: Path) -> None:
    """No roles and no limits are given: whoever is there takes what another leaves."""

    def deeds(witness: Witness) -> None:
        until_all_work(witness)
        by_address = {host.address: host for host in hosts.hosts}
        home = by_address[witness.host_of("trainer/0")]
        other = by_address[next(one for name in GENERATORS if (one := witness.host_of(name)) != home.address)]

        frozen_s = time.monotonic()
        other.freeze()
        victim = next(name for name in GENERATORS if witness.host_of(name) == other.address)
        taken_s, reason = witness.until_dead(victim, frozen_s)
        print(f"frozen: noticed after {taken_s:.1f} s: {reason}")
        assert taken_s < NOTICED_S
        witness.until_works(victim, frozen_s)
        assert witness.host_of(victim) != other.address, "started elsewhere"
        other.thaw()
        assert wait_until(lambda: not executors_on(other), 2 * HOST_S), "what thaws is over"

        killed_s = time.monotonic()
        home.kill()
        taken_s, reason = witness.until_dead("trainer/0", killed_s)
        print(f"the trainer's host killed: noticed after {taken_s:.1f} s: {reason}")
        assert taken_s < NOTICED_S
        witness.until_works("trainer/0", killed_s)
        witness.until_updates(3)
        home.start()

    config = config_for(hosts, [{"address": host.address} for host in hosts.hosts], "generator.replicas=2")
    summary, _ = run(hosts, config, tmp_path / "run", deeds)
    check_nothing_lost(tmp_path / "run", summary)
    assert audit(read_ledger(tmp_path / "run" / "ledger")).rewinds == 1


def test_a_host_that_comes_late_takes_part_and_one_without_our_certificate_is_turned_away(
    hosts: Cluster, tmp_path: Path
) -> None:
    from llamarl.engine.monarch.certs import make_certificates

    first, second, late = hosts.hosts
    late.kill()
    (foreign,) = make_certificates(tmp_path / "foreign", [late.address.rpartition(":")[0]], days=1)
    late.start(certs=foreign)

    def deeds(witness: Witness) -> None:
        witness.until_updates(5)
        assert {witness.host_of(name) for name in ("generator/0", "trainer/0", "reward/0")} <= {
            first.address,
            second.address,
        }
        assert ("generator/1", 0) not in (witness.engine._ranks if witness.engine else {}), (
            "another cluster's certificate"
        )
        late.kill()
        late.start()
        came_s = time.monotonic()
        witness.until_works("generator/1", came_s)
        assert witness.host_of("generator/1") == late.address
        witness.until_updates(2)

    places: list[dict[str, object]] = [
        {"address": first.address, "roles": ["trainer", "reward"]},
        {"address": second.address, "ranks": 1},
        {"address": late.address, "ranks": 1},
    ]
    summary, _ = run(hosts, config_for(hosts, places, "generator.replicas=2"), tmp_path / "run", deeds)
    check_nothing_lost(tmp_path / "run", summary)


@pytest.mark.parametrize("shown", ["nothing", "no certificate", "a foreign certificate", "ours"])
def test_a_worker_listens_only_to_those_who_show_a_certificate_of_the_cluster(
    hosts: Cluster, shown: str, tmp_path: Path
) -> None:
    from llamarl.engine.monarch.certs import make_certificates

    host, _, port = hosts.hosts[1].address.rpartition(":")
    assert wait_until(lambda: listens(host, int(port)), STAGE_S)
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        if shown == "nothing":
            assert hung_up(plain, bytes(1 << 16))
            return
        context = ssl.create_default_context(cafile=str(hosts.certs / "ca.crt"))
        folder = {"ours": hosts.certs}.get(shown)
        if shown == "a foreign certificate":
            (folder,) = make_certificates(tmp_path / "foreign", ["10.0.0.1"], days=1)
        if folder is not None:
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        with context.wrap_socket(plain, server_hostname=host) as secured:
            assert hung_up(secured, b"") == (shown != "ours")


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def hung_up(connection: socket.socket, greeting: bytes) -> bool:
    """Whether the other side ends the connection within a while; a server that waits for us does not."""
    connection.settimeout(2.0)
    try:
        connection.sendall(greeting)
        while connection.recv(1024):
            pass  # it may say why
        return True
    except TimeoutError:
        return False
    except (ssl.SSLError, ConnectionError):
        return True
