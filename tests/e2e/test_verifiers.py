"""Whole jobs at an environment server that speaks as that of verifiers does: a stand-in, which can lie, hang or die."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.brief import BRIEF, ROOT
from helpers.cli import llamarl

from llamarl import Run

pytest.importorskip("zmq")
pytest.importorskip("uvicorn")
pytest.importorskip("httptools")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "data" / "stand_ins"), prepend=":")


def train(run: Path, *settings: str, config: str = "{}") -> tuple[int, str]:
    asked = ["task=verifiers", "task.env=sums", f"task.env_python={sys.executable}", f"task.env_config={config}"]
    small = ["schedule.groups_per_update=2", "evaluate.prompts=1", "generator.threads=1", "trainer.threads=1"]
    agent = ["agent.environment=verifiers", "agent.workers=2", "generator.max_new_tokens=4", "generator.temperature=2"]
    code, _, err = llamarl("train", *BRIEF, *small, *agent, *asked, *settings, "--run", run)
    return code, err


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_episodes_train_and_what_the_server_tells_is_what_was_sampled(tmp_path: Path, engine: str) -> None:
    hard = ["task.curriculum=true", "schedule.dynamic_sampling=1", "algo.zero_variance=keep"]
    assert train(tmp_path / "run", f"engine={engine}", *hard) == (0, "")
    assert llamarl("audit", tmp_path / "run").code == 0
    run = Run(tmp_path / "run")
    assert run.summary is not None and isinstance(run.summary.agents, dict)
    assert run.summary.agents["agent_failures"] == 0 and run.summary.updates == 2
    for group in run.rollouts.groups(0):
        assert all(one.reward == 0.5 * one.parts["length"] == 0.5 * len(one.tokens) for one in group.rollouts)
    assert max(run.metrics()["logprob_gap"]) < 1e-4


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("another token", "tells of an answer that was not sampled here"),
        ("hides an answer", "says nothing of 1 of 2 answers that were sampled"),
        ("infinite reward", "was given a reward that is no finite number"),
        ("hang", "agent lost the environment server"),
    ],
)
def test_a_server_that_lies_or_hangs_ends_the_job_with_one_line(tmp_path: Path, fault: str, told: str) -> None:
    code, err = train(tmp_path / "run", "agent.timeout_s=2", "schedule.updates=50", config=f"{{fault: {fault}}}")
    assert code and told in err and "Traceback" not in err
    assert "more than agent.max_failure_share" in err


def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    config = f"{{fault: dies once, flag: {tmp_path / 'flag'}}}"
    limits = ["agent.timeout_s=60", "agent.max_failure_share=1", "agent.retries=3"]
    code, _ = train(tmp_path / "run", *limits, config=config)
    run = Run(tmp_path / "run")
    assert code == 0 and run.summary is not None and run.summary.updates == 2 and run.summary.groups_dropped == 0
    assert isinstance(run.summary.agents, dict) and run.summary.agents["agent_failures"] > 0
    assert run.summary.agents["agent_restarts"] == 1
    assert llamarl("audit", tmp_path / "run").code == 0


def test_what_is_wrong_is_told_before_the_start(tmp_path: Path) -> None:
    code, err = train(tmp_path / "run", "task.env=nosuch")
    assert code == 2 and "task.env: nosuch cannot be loaded: ModuleNotFoundError: taskset 'nosuch' not found" in err
    code, err = train(tmp_path / "run", "task.env=old")
    assert code == 2 and "task.env: old cannot be loaded: old has the old interface of verifiers (v0" in err
    code, err = train(tmp_path / "run", "task.env_python=/no/python")
    assert code == 2 and "task.env_python: /no/python cannot be run" in err
    code, err = train(tmp_path / "run", "agent.environment=''")
    assert code == 2 and "agent.environment: must be verifiers with task.kind=verifiers" in err
