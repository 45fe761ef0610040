"""Whole jobs whose samples are dialogues of agents: through HTTP, with the exact tokens, whatever dies meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.killing import KillAt, Killed
from helpers.mortal_executors import FLAG, build_mortal_agents, build_mortal_generator

from llamarl import Job
from llamarl.builders.context import Builder
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.observe.summary import Summary
from llamarl.runs.run import Run

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")
ROOT = Path(__file__).parents[2]
SMALL = [
    "task.max_operand=99",
    "schedule.updates=3",
    "schedule.groups_per_update=2",
    "schedule.samples_per_group=3",
    "schedule.probe_every=2",
    "generator.slots=16",
    "generator.max_new_tokens=8",
    "generator.temperature=2.0",
    "generator.threads=1",
    "trainer.threads=1",
    "trainer.warmup_updates=0",
    "evaluate.prompts=2",
    "agent.workers=2",
    "agent.timeout_s=60",
    "snapshots.at_end=none",
]
# The second sample forks its history, the third one rewrites it.
AGENT = """
async def run(problem, client):
    chat = [{"role": "user", "content": problem.prompt}]
    said = (await client.chat(chat))["content"] or ""
    left = [*chat, {"role": "assistant", "content": said}, {"role": "user", "content": "1="}]
    right = [*chat, {"role": "assistant", "content": said}, {"role": "user", "content": "2="}]
    changed = [*chat, {"role": "assistant", "content": said + "7"}, {"role": "user", "content": "3="}]
    for messages in (left, right, changed):
        await client.chat(messages)
    return {"reward": len(said), "calls": 4}

async def crash(problem, client):
    await client.chat([{"role": "user", "content": problem.prompt}])
    raise RuntimeError("no such tool")

async def posts(problem, client):
    await client.chat([{"role": "user", "content": problem.prompt}])
    await client.reward(0.25)
    await client.reward(0.5)

async def silent(problem, client):
    return 1.0

async def asks(problem, client):
    await client.chat([{"role": "user", "content": problem.prompt}])

async def streams(problem, client):
    import asyncio, json, urllib.request
    body = {"model": client.model, "messages": [{"role": "user", "content": problem.prompt}], "stream": True}
    head = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(client.base_url + "/chat/completions", json.dumps(body).encode(), head)
    with await asyncio.to_thread(urllib.request.urlopen, request) as answer:
        assert answer.read().decode().rstrip().endswith("[DONE]")
    return 1.0
"""


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENT)
    return tmp_path / "agents.py"


def train(run: Path, *settings: str, builders: Mapping[str, Builder] | None = None) -> Summary:
    return Job(load_config(None, [*SMALL, *settings]), builders=builders).run(run)


def check_books(run: Path) -> None:
    report = audit(read_ledger(run / "ledger"))
    assert report.clean, report


def test_forked_and_changed_histories_become_branches(agents: Path, tmp_path: Path) -> None:
    summary = train(tmp_path / "run", "engine=inline", f"agent.run={agents}:run")
    check_books(tmp_path / "run")
    assert isinstance(summary.agents, dict)
    sessions = summary.agents["agent_sessions"]
    assert sessions == 3 * 2 * 3 + 2 * 2  # training, and two evaluations
    assert summary.agents["agent_calls"] == 4 * sessions
    assert summary.agents["agent_branches"] == 3 * sessions
    assert summary.agents["agent_unmatched"] == sessions
    assert summary.agents["agent_failures"] == 0
    for group in Run(tmp_path / "run").rollouts.groups(0):
        rewards = [rollout.reward for rollout in group.rollouts]
        assert len(rewards) == 9  # three branches of three samples
        assert rewards[::3] == rewards[1::3] == rewards[2::3]
        assert all(rollout.parts == {"calls": 4.0} for rollout in group.rollouts)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "branches" in row]
    assert trained and all(row["branches"] == 3.0 and row["completions"] == 6.0 for row in trained)
    assert any("logprob_gap" in row and row["logprob_gap"] < 1e-3 for row in rows)


def test_a_generator_that_dies_is_noticed_by_no_agent(
    agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLAG, str(tmp_path / "killed"))
    builders = {"generator": build_mortal_generator}
    settings = ("engine=local", f"agent.run={agents}:run", "generator.replicas=2", "agent.retries=0")
    summary = train(tmp_path / "run", *settings, builders=builders)
    check_books(tmp_path / "run")
    assert (tmp_path / "killed").exists() and summary.restarts == 1
    assert isinstance(summary.agents, dict)
    assert (summary.agents["agent_failures"], summary.groups_dropped) == (0, 0)


def test_groups_of_an_executor_that_dies_are_handed_out_again(
    agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agents are killed, their calls cancelled, and the log of it all replays."""
    monkeypatch.setenv(FLAG, str(tmp_path / "killed"))
    builders = {"agent": build_mortal_agents}
    summary = train(tmp_path / "run", "engine=local", f"agent.run={agents}:run", builders=builders)
    check_books(tmp_path / "run")
    assert (tmp_path / "killed").exists() and (summary.restarts, summary.groups_dropped) == (1, 0)
    replayed = llamarl("replay", tmp_path / "run")
    assert replayed.code == 0, replayed.err


def test_a_killed_job_goes_on(agents: Path, tmp_path: Path) -> None:
    settings = ("engine=inline", f"agent.run={agents}:posts", "snapshots.every=1", "snapshots.at_end=whole")
    with pytest.raises(Killed):
        train(tmp_path / "run", *settings, builders={"trainer": KillAt(2)})
    summary = Job.resume(tmp_path / "run")
    assert (summary.updates, summary.updates_before, summary.reward_last) == (3, 2, 0.75)
    check_books(tmp_path / "run")


def test_rewards_that_are_sent_are_added_up(agents: Path, tmp_path: Path) -> None:
    summary = train(tmp_path / "run", "engine=inline", f"agent.run={agents}:posts", "schedule.updates=1")
    assert (summary.reward_last, summary.eval_after) == (0.75, 0.75)


def test_a_scorer_judges_what_the_model_wrote_last(agents: Path, tmp_path: Path) -> None:
    settings = ("reward.scorer=length", "reward.max_chars=16", "agent.reward=scorer", "schedule.updates=1")
    summary = train(tmp_path / "run", "engine=inline", f"agent.run={agents}:asks", *settings)
    assert 0 < summary.reward_last <= 1
    check_books(tmp_path / "run")


def test_an_agent_may_stream(agents: Path, tmp_path: Path) -> None:
    summary = train(tmp_path / "run", "engine=inline", f"agent.run={agents}:streams", "schedule.updates=1")
    assert (summary.reward_last, summary.groups_dropped) == (1.0, 0)


@pytest.mark.parametrize(
    ("agent", "told"),
    [("crash", "RuntimeError: no such tool"), ("silent", "made no call"), ("asks", "gave no reward")],
)
def test_agents_that_fail_end_the_job_and_are_never_wrong_answers(
    agents: Path, tmp_path: Path, agent: str, told: str
) -> None:
    with pytest.raises(
        LlamaRLError, match=rf"agents failed; more than agent.max_failure_share=0\.1; the last: .*{told}"
    ):
        train(tmp_path / "run", "engine=inline", f"agent.run={agents}:{agent}", "schedule.updates=50")
    assert not [record for record in read_ledger(tmp_path / "run" / "ledger") if type(record).__name__ == "Passed"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_shell_script_with_curl_is_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = ("engine=inline", "agent.command=[sh, examples/agent_calculator.sh]", "schedule.updates=1")
    summary = train(tmp_path / "run", *settings)
    assert isinstance(summary.agents, dict) and summary.agents["agent_failures"] == 0
    check_books(tmp_path / "run")


def test_a_missing_program_is_told_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.command: no program no-such-agent"):
        train(tmp_path / "run", "agent.command=[no-such-agent]")
