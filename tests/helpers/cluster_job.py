"""Runs a job over several hosts while a test does something to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.cluster import Cluster
from helpers.pace import paced_generator
from llamarl import Job
from llamarl.config import Config
from llamarl.observe.summary import Summary

if TYPE_CHECKING:
    from helpers.witness import Witness

STAGE_S = 60.0  # time within which everything that a test waits for must come about


def run(found: Cluster, config: Config, folder: Path, deeds: Callable[[Witness], None]) -> tuple[Summary, Witness]:
    """The job, slowly, while the deeds are done to its hosts, then fast to its end."""
    from helpers.witness import Witness  # imports Monarch, which must find its certificates then

    witness, failures = Witness(STAGE_S), list[BaseException]()
    pace = found.folder / "pace"
    pace.touch()

    def do() -> None:
        try:
            witness.until_updates(2)
            deeds(witness)
        except BaseException as error:
            failures.append(error)
        finally:
            pace.unlink()

    thread = threading.Thread(target=do)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamarl.jobs.engines.engine_class", lambda kind: witness.engine_class())
        thread.start()
        summary = Job(config, builders={"generator": paced_generator}).run(folder)
    assert not pace.exists() or failures, "the job ended before everything was done to it"
    thread.join()
    if failures:
        raise failures[0]
    return summary, witness
