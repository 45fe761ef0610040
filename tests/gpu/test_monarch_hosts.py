"""Jobs over several hosts with GPU ranks: weights over NCCL; hosts and the job itself are killed, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.cluster import Cluster
from helpers.cluster_job import run
from helpers.loopback import loopback_cluster
from helpers.outside import RunningJob
from helpers.pace import PACE
from helpers.probes import logprob_gaps
from helpers.processes import wait_until

from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.engine.monarch.install import prepare_environment

if TYPE_CHECKING:
    from helpers.witness import Witness

pytestmark = pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch")
UPDATES = 60
GENERATORS = ("generator/0", "generator/1")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hosts")
    with loopback_cluster(folder, num_hosts=3, environment={PACE: str(folder / "pace")}) as found:
        for host in found.hosts:
            host.start()
        prepare_environment("certs", str(found.certs))
        yield found


def settings(found: Cluster, num_hosts: int) -> list[str]:
    home, *others = found.hosts[:num_hosts]
    places: list[dict[str, object]] = [{"address": home.address, "roles": ["trainer", "reward"]}]
    places += [{"address": host.address, "ranks": 2, "roles": ["generator"]} for host in others]
    return [
        *found.settings,
        f"engine.hosts=[{', '.join(map(str, places))}]",
        "engine.share_gpus=true",
        "engine.host_s=5",
        "engine.silence_s=30",
        "weights.lease_s=10",
        "trainer.data=2",
        "trainer.tensor=2",
        "trainer.compile='off'",
        "generator.tensor=2",
        f"generator.replicas={num_hosts - 1}",
        "generator.dtype=float32",
        "trainer.dtype=float32",
        f"schedule.updates={UPDATES}",
        "schedule.groups_per_update=8",
        "schedule.samples_per_group=4",
        "schedule.probe_every=5",
        "schedule.max_restarts=9",
        "schedule.max_attempts=99",
        "generator.slots=64",
        "evaluate.prompts=0",
        "snapshots.every=5",
    ]


def check(folder: Path) -> None:
    found = audit(read_ledger(folder / "ledger"))
    assert found.clean and (found.updates, found.trained, found.dropped) == (UPDATES, UPDATES * 8, {}), found
    gaps = logprob_gaps(folder)
    assert len(gaps) >= UPDATES // 5 and max(gaps) < 1e-4, gaps


def test_three_hosts_two_of_which_are_killed_and_come_back(hosts: Cluster, tmp_path: Path) -> None:
    home, one, _ = hosts.hosts

    def deeds(witness: Witness) -> None:
        for name in GENERATORS:
            witness.until_works(name, 0.0)
        first = next(name for name in GENERATORS if witness.host_of(name) == one.address)
        (second,) = set(GENERATORS) - {first}
        killed_s = time.monotonic()
        one.kill()
        taken_s, reason = witness.until_dead(first, killed_s)
        print(f"killed a generator's host: noticed after {taken_s:.1f} s: {reason}")
        witness.until_updates(3)
        assert not witness.deaths(second) and not witness.deaths("trainer/0"), "the others go on"
        back_s = time.monotonic()
        one.start()
        witness.until_works(first, back_s)
        print(f"started again: at work after {time.monotonic() - back_s:.1f} s")

        killed_s = time.monotonic()
        home.kill()
        taken_s, reason = witness.until_dead("trainer/0", killed_s)
        print(f"killed the trainer's host: noticed after {taken_s:.1f} s: {reason}")
        home.start()
        witness.until_works("trainer/0", killed_s)
        print(f"at work after {time.monotonic() - killed_s:.1f} s")
        witness.until_updates(3)

    config = load_config(None, settings(hosts, 3))
    summary, witness = run(hosts, config, tmp_path / "run", deeds)
    assert summary.outcome == "finished"
    check(tmp_path / "run")
    assert len(witness.deaths("trainer/0")) == 1


def test_two_hosts_whose_job_is_killed_and_resumed(hosts: Cluster, tmp_path: Path) -> None:
    job = RunningJob(tmp_path / "run", settings(hosts, 2))
    try:
        assert wait_until(lambda: (tmp_path / "run/snapshots/10").exists() or not job.running, 120)
        job.kill_and_resume()
        assert job.wait(200) == 0
    finally:
        job.end()
    check(tmp_path / "run")
