"""Several hosts on one machine without namespaces: workers at different loopback addresses, which share its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from helpers.cluster import Cluster, ClusterHost
from helpers.processes import marked_processes

_MARK = "LLAMARL_TEST_HOST"


class LoopbackHost(ClusterHost):
    """A worker, and all processes that descend from it."""

    @property
    def enter(self) -> tuple[str, ...]:
        return ()

    @property
    def processes(self) -> list[int]:
        return sorted(marked_processes(f"{_MARK}={self.name}"))


@contextmanager
def loopback_cluster(folder: Path, num_hosts: int, environment: Mapping[str, str]) -> Iterator[Cluster]:
    """Hosts 127.0.0.2, 127.0.0.3 and so on; the job runs at 127.0.0.1."""
    from llamarl.engine.monarch.certs import make_certificates

    addresses = [f"127.0.0.{index + 1}" for index in range(num_hosts + 1)]
    own, *certs = make_certificates(folder / "certs", addresses, days=1)
    hosts: list[ClusterHost] = []
    for index, (address, cert) in enumerate(zip(addresses[1:], certs, strict=True)):
        name = f"{os.getpid()}-{index}"
        hosts.append(LoopbackHost(name, address, cert, {**environment, _MARK: name}, folder / f"host{index}.log"))
    try:
        yield Cluster(folder, hosts, own, addresses[0], interface="lo")
    finally:
        for host in hosts:
            host.kill()
