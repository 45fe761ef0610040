"""The cluster that all tests of this folder share: a process can use Monarch with one set of certificates only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.cluster import Cluster, cluster
from helpers.pace import PACE

from llamarl.engine.monarch.install import prepare_environment


@pytest.fixture(scope="session")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts without workers."""
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(folder, num_hosts=3, environment={PACE: str(folder / "pace")}) as found:
        prepare_environment("certs", str(found.certs))
        yield found


@pytest.fixture(scope="module")
def hosts(namespaces: Cluster) -> Iterator[Cluster]:
    """Three hosts with workers."""
    for host in namespaces.hosts:
        host.start()
    yield namespaces
    for host in namespaces.hosts:
        host.kill()
