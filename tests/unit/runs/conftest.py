"""One short run for all tests that read one."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.killing import TINY

from llamarl import Job
from llamarl.config.file import load_config

SETTINGS = (*TINY, "engine=inline", "schedule.updates=3", "evaluate.prompts=8", "snapshots.every=1")


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "run"
    Job(load_config(None, SETTINGS)).run(folder)
    return folder
