"""Jobs on a cluster of namespaces, to whose hosts something is done while they run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.cluster import Cluster, ClusterHost
from helpers.killing import TINY
from helpers.pace import paced_generator
from llamarl import Job
from llamarl.builders.context import Builder
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.observe.summary import Summary

if TYPE_CHECKING:
    from helpers.witness import Witness

GENERATORS = ("generator/0", "generator/1")
UPDATES = 120
STAGE_S = 300.0  # starting a worker imports torch, which takes minutes where others compute
HOST_S = 3.0
NOTICED_S = HOST_S + 2.0  # and what this machine takes to get round to it


def config_for(found: Cluster, hosts: list[dict[str, object]], *settings: str) -> Config:
    listed = "[" + ", ".join(str(host) for host in hosts) + "]"
    return load_config(
        None,
        [
            *TINY,
            *found.settings,
            f"engine.host_s={HOST_S}",
            f"engine.hosts={listed}",
            f"schedule.updates={UPDATES}",
            "schedule.max_restarts=9",
            "schedule.max_attempts=99",
            "snapshots.every=10",
            "evaluate.prompts=8",
            "weights.lease_s=5",
            *settings,
        ],
    )


def run(
    found: Cluster,
    config: Config,
    folder: Path,
    deeds: Callable[[Witness], None],
    *,
    after: int = 2,
    generator: Builder = paced_generator,
) -> tuple[Summary, Witness]:
    """The job, slowly, while the deeds are done to its hosts, beginning `after` so many updates, then fast to its end."""
    from helpers.witness import Witness  # imports Monarch, which must find its certificates then

    witness, failures, over = Witness(STAGE_S), list[BaseException](), threading.Event()
    pace = found.folder / "pace"
    pace.touch()

    def do() -> None:
        try:
            witness.until_updates(after)
            deeds(witness)
        except BaseException as error:
            failures.append(error)
            if config.engine.join and not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)  # it may wait for a host that will not come
        finally:
            pace.unlink(missing_ok=True)

    thread = threading.Thread(target=do)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamarl.jobs.engines.engine_class", lambda kind: witness.engine_class())
        thread.start()
        try:
            summary = Job(config, builders={"generator": generator}).run(folder)
        finally:
            over.set()
    assert not pace.exists() or failures, "the job ended before everything was done to it"
    thread.join()
    if failures:
        raise failures[0]
    return summary, witness


def check_nothing_lost(folder: Path, summary: Summary) -> None:
    ledger = audit(read_ledger(folder / "ledger"))
    assert ledger.clean, ledger
    assert (summary.outcome, ledger.updates, ledger.trained, ledger.dropped) == ("finished", UPDATES, UPDATES * 4, {})


def executors_on(host: ClusterHost) -> list[int]:
    """Processes that write into the log of an executor."""
    found = []
    for pid in host.processes:
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/1")
            if target.endswith(".log") and "/logs/" in target:
                found.append(pid)
    return found
