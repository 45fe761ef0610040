"""Agents run in processes of their own, several at a time; each comes back with its reward, or with why it failed."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from llamarl.config import AgentConfig, Config
from llamarl.errors import ConfigError
from llamarl.tasks.agents.client import AgentClient
from llamarl.tasks.agents.runner import AgentRunner
from llamarl.tasks.workers.protocol import Verdict
from llamarl.types import Problem

PROBLEM = Problem("4+5=", "9")
CLIENT = AgentClient("http://127.0.0.1:1", "sk-1", "tiny")
AGENTS = """
import os, time

async def right(problem, client):
    assert client.base_url == "http://127.0.0.1:1/v1"
    return float(problem.answer == "9")

def plain(problem, client):
    return {"reward": 0.5, "steps": 3, "note": "left out"}

async def silent(problem, client):
    return None

async def wrong(problem, client):
    return "yes"

async def crash(problem, client):
    raise RuntimeError(f"no such tool for {problem.prompt}")

async def late(problem, client):
    time.sleep(60) if client.api_key == "block" else None
    import asyncio
    await asyncio.sleep(60)

async def dies(problem, client):
    os._exit(7)

class Solver:
    def __init__(self):
        self.calls = 0
    async def run(self, problem, client):
        self.calls += 1
        return self.calls

class NoAgent:
    pass

def other(question):
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    return tmp_path / "agents.py"


def verdicts(settings: AgentConfig, clients: tuple[AgentClient, ...] = (CLIENT,)) -> list[Verdict]:
    runner = AgentRunner(settings)
    try:
        runner.prepare()
        runner.start(range(len(clients)), PROBLEM, clients)
        ended: dict[object, Verdict] = {}
        while len(ended) < len(clients):
            ended.update(runner.collect(1.0))
        return [ended[key] for key in range(len(clients))]
    finally:
        runner.close()


def run(file: Path, name: str, timeout_s: float = 30.0) -> Verdict:
    (verdict,) = verdicts(AgentConfig(run=f"{file}:{name}", workers=1, timeout_s=timeout_s))
    return verdict


def test_functions_and_classes_give_rewards(file: Path) -> None:
    assert run(file, "right").rewards == (1.0,)
    plain = run(file, "plain")
    assert (plain.rewards, plain.parts) == ((0.5,), {"steps": 3.0})
    assert run(file, "silent").rewards == ()
    several = verdicts(AgentConfig(run=f"{file}:Solver", workers=1), (CLIENT,) * 3)
    assert [one.rewards for one in several] == [(1.0,)] * 3  # an object for each sample


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("wrong", "error", "gave str as its reward"),
        ("crash", "error", r"agent failed: RuntimeError: no such tool for 4\+5= \(.*agents.py:"),
        ("late", "timeout", "took longer than agent.timeout_s=0.2"),
        ("dies", "error", "its process ended without a verdict"),
    ],
)
def test_failures_are_told_apart(file: Path, name: str, status: str, reason: str) -> None:
    verdict = run(file, name, timeout_s=0.2 if name == "late" else 30.0)
    assert verdict.status == status and re.search(reason, verdict.reason), verdict


def test_an_agent_that_blocks_is_killed(file: Path) -> None:
    blocked = AgentClient(CLIENT.url, "block", "tiny")
    (verdict,) = verdicts(AgentConfig(run=f"{file}:late", workers=1, timeout_s=0.2), (blocked,))
    assert verdict.status == "timeout"


SCRIPT = """
import json, os, sys
problem = json.load(sys.stdin)
assert os.environ["OPENAI_BASE_URL"].endswith("/v1") and os.environ["ANTHROPIC_API_KEY"] == "sk-1"
print("thinking")
print({last})
"""


@pytest.mark.parametrize(
    ("last", "rewards"),
    [("problem['answer'] == '9' and 1", (1.0,)), ("'{\"reward\": 0.25}'", (0.25,)), ("'done'", ())],
)
def test_a_command_says_its_reward_in_its_last_line(tmp_path: Path, last: str, rewards: tuple[float, ...]) -> None:
    (tmp_path / "agent.py").write_text(SCRIPT.replace("{last}", last))
    (verdict,) = verdicts(AgentConfig(command=("python3", str(tmp_path / "agent.py")), workers=1))
    assert (verdict.status, verdict.rewards) == ("ok", rewards)


def test_a_command_that_fails_is_no_wrong_answer() -> None:
    (verdict,) = verdicts(AgentConfig(command=("sh", "-c", "echo 0; echo no key >&2; exit 3"), workers=1))
    assert verdict.status == "error" and "exit code 3: no key" in verdict.reason


def test_an_agent_that_cannot_be_loaded_is_refused(file: Path) -> None:
    for name, told in (("NoAgent", "has no method run"), ("other", "problem, client"), ("missing", "no function")):
        with pytest.raises(ConfigError, match=told):
            AgentRunner(AgentConfig(run=f"{file}:{name}", workers=1)).prepare()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"agent": AgentConfig(run="a.py:b"), "deterministic": True}, "agent: agents' calls come in any order"),
        (
            {"agent": AgentConfig(run="a.py:b"), "tool": "calculator"},
            "agent: cannot take effect with conversation.tool",
        ),
    ],
)
def test_what_agents_cannot_be_combined_with_is_refused(settings: dict[str, object], told: str) -> None:
    made: dict[str, object] = {"agent": msgspec.to_builtins(settings["agent"])}
    if "tool" in settings:
        made["conversation"] = {"tool": settings["tool"]}
    if "deterministic" in settings:
        made["schedule"] = {"deterministic": True}
    with pytest.raises((ConfigError, msgspec.ValidationError), match=told):
        msgspec.convert(made, Config)


def test_a_function_and_a_command_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        AgentConfig(run="a.py:b", command=("sh",))
