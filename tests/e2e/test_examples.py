"""The examples run as their first lines say, and their functions do what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.brief import BRIEF, ROOT, TINY
from helpers.cli import llamarl
from helpers.groups import completion, rollout_group
from helpers.sandboxes import skip_without_sandbox

from llamarl import Job
from llamarl.algo.batch import TokenBatch, make_documents
from llamarl.algo.losses import Loss
from llamarl.config import AlgoConfig, RewardConfig
from llamarl.config.file import load_config
from llamarl.plugins import load_function
from llamarl.tasks.judge import Judge
from llamarl.tasks.scorers import Scorer
from llamarl.types import Problem


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_smollm2_arithmetic_trains_with_the_tiny_model(tmp_path: Path) -> None:
    settings = [*BRIEF, *TINY, "evaluate.every=1"]
    code, _, err = llamarl("train", "examples/smollm2_arithmetic.yaml", *settings, "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    assert llamarl("audit", tmp_path / "run").code == 0


def test_a_mixture_of_experts_trains(tmp_path: Path) -> None:
    code, _, err = llamarl(
        "train", "examples/moe_arithmetic.yaml", *BRIEF, "evaluate.every=1", "--run", tmp_path / "run"
    )
    assert (code, err) == (0, "")
    assert llamarl("audit", tmp_path / "run").code == 0
    gaps = [row["logprob_gap"] for row in metrics_of(tmp_path / "run") if "logprob_gap" in row]
    assert gaps
    assert max(gaps) < 1e-4, "trainer and generator choose the same experts in fp32"


def test_ppo_with_a_critic_trains(tmp_path: Path) -> None:
    code, _, err = llamarl("train", "examples/ppo_critic.yaml", *BRIEF, "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    assert llamarl("audit", tmp_path / "run").code == 0
    assert all(row["value_steps"] == 32 for row in metrics_of(tmp_path / "run")), "two passes of sixteen steps"


def test_math_trains_with_the_tiny_model_and_is_judged_by_workers(tmp_path: Path) -> None:
    data = ["task.path=tests/data/math", "task.held_out=0.2", "evaluate.split=held_out", "evaluate.every=0"]
    small = [*BRIEF, *TINY, "generator.kv_pages=0", "schedule.window=1"]
    code, _, err = llamarl("train", "examples/math_qwen.yaml", *small, *data, "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    assert llamarl("audit", tmp_path / "run").code == 0


def test_generate_prints_every_sample_with_its_worth() -> None:
    command = [sys.executable, "examples/generate.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert [line.partition("=")[0] for line in lines] == ["12+34"] * 3 + ["7+8"] * 3
    assert all(line.endswith((", stop", ", length")) for line in lines)


def test_an_own_logger_writes_each_update_once_also_after_a_resume(tmp_path: Path) -> None:
    run, settings = tmp_path / "run", [*BRIEF, *TINY, "engine=inline", "evaluate.every=1"]
    logger = load_function("example", "examples/own_logger.py:CsvLogger")
    job = Job.load(None, [*settings, "schedule.updates=3"], loggers=[logger()])
    job.run(run)
    Job.resume(run, overrides=["schedule.updates=5"], loggers=[logger()])
    rows = [line.split(",") for line in (run / "rewards.csv").read_text().splitlines()]
    assert [int(step) for kind, step, _ in rows if kind == "reward"] == [0, 1, 2, 3, 4]
    assert [float(value) for kind, _, value in rows if kind == "reward"] == [row["reward"] for row in metrics_of(run)]
    assert [kind for kind, *_ in rows].count("held_out_accuracy") == len(
        (run / "evaluations.jsonl").read_text().splitlines()
    )


def test_callbacks_are_called_and_the_run_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = load_function("main", "examples/callbacks.py:main")(BRIEF, tmp_path / "run")
    assert summary.outcome == "finished"
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said if line.startswith("update")] == ["update 1 of 2", "update 2 of 2"]
    assert said[-1] == "finished after 2 updates" and any(line.startswith("version 0: accuracy") for line in said)
    assert len((tmp_path / "run" / "best.txt").read_text().splitlines()) == 2
    load_function("main", "examples/read_a_run.py:main")(str(tmp_path / "run"))
    read = capsys.readouterr().out.splitlines()
    assert read[0].startswith("finished: 2 of 2 updates") and sum("advantage" in line for line in read) == 4


def test_the_custom_loss_trains_a_job_from_the_command_line(tmp_path: Path) -> None:
    code, out, err = llamarl("train", "examples/custom_loss.yaml", *BRIEF, "--run", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "held-out accuracy" in out
    updates = [line for line in metrics_of(tmp_path / "run") if "loss" in line]
    assert len(updates) == 2
    assert all("moved_share" in line and "clipped_share" not in line for line in updates), "AIPO's metrics"
    assert llamarl("audit", tmp_path / "run").code == 0


def test_the_custom_reward_judges_a_job_from_python(tmp_path: Path) -> None:
    summary = Job.load("examples/custom_reward.yaml", BRIEF).run(tmp_path / "run")
    assert (summary.outcome, summary.updates, summary.groups_trained, summary.groups_dropped) == ("finished", 2, 8, 0)
    rewards = [line["reward"] for line in metrics_of(tmp_path / "run") if "reward" in line]
    assert any(reward * 16 % 1 for reward in rewards), "only whole points: no partial credit was given"


def test_the_custom_role_runs_as_a_process_of_its_own(tmp_path: Path) -> None:
    job = load_function("make_job", "examples/custom_role.py:make_job")([*BRIEF, "engine=local"])
    summary = job.run(tmp_path / "run")
    assert (summary.outcome, summary.updates, summary.groups_trained) == ("finished", 2, 8)
    rows = [row for row in metrics_of(tmp_path / "run") if "role" in row]
    assert [str(row["role"]) for row in rows] == ["discounter", "trainer"] * 2
    assert llamarl("audit", tmp_path / "run").code == 0


def test_the_custom_role_discounts_an_advantage_by_the_distance_from_the_end() -> None:
    discount = load_function("discount", "examples/custom_role.py:discount")
    group = rollout_group([1], [(completion([2, 3, 4]), 1.0), (completion([5]), 0.0)])
    first, second = make_documents([discount(group)], version=0, algo=AlgoConfig())
    assert first.advantages.tolist() == pytest.approx([0.5 * 0.95**2, 0.5 * 0.95, 0.5])
    assert second.advantages.tolist() == [-0.5]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_job(path: Path) -> None:
    load_config(path)


def test_the_programs_that_come_with_the_example_solve_its_problems() -> None:
    skip_without_sandbox()
    rows = [json.loads(line) for line in (ROOT / "examples/data/programs.jsonl").read_text().splitlines()]
    judge = Judge(RewardConfig(scorer="code", workers=2, retries=0))
    for number, row in enumerate(rows):
        for kind, text in (("right", row["solution"]), ("wrong", "print(0)")):
            judge.ask((number, kind), f"Here it is:\n```python\n{text}\n```", Problem("", json.dumps(row["tests"])))
    found: dict[object, float] = {}
    while judge.num_pending:
        found |= {key: outcome.reward for key, outcome in judge.collect(1.0)}
    judge.close()
    assert found == {
        (number, kind): float(kind == "right") for number in range(len(rows)) for kind in ("right", "wrong")
    }


def test_programs_are_judged_in_a_job(tmp_path: Path) -> None:
    """The shipped model cannot program: it writes digits, and they pass no test."""
    skip_without_sandbox()
    settings = [*BRIEF, "model.path=tiny", "task.chat=false", "reward.workers=1", "generator.max_prompt_tokens=240"]
    settings += ["generator.max_new_tokens=8", "trainer.lr=1e-5", "schedule.updates=1", "evaluate.prompts=1"]
    settings += ["task.path=examples/data/programs.jsonl", "task.held_out=0.2", "evaluate.split=held_out"]
    summary = Job.load("examples/code.yaml", settings).run(tmp_path / "run")
    assert (summary.outcome, summary.groups_trained, summary.groups_dropped) == ("finished", 4, 0)
    assert (summary.reward_first, summary.score_failures) == (0.0, 0)


@pytest.fixture
def score() -> Scorer:
    return load_function("reward.scorer", "examples/custom_reward.py:score")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("123", 1.0), (" 123\n", 1.0), ("124", 0.2), ("923", 0.2), ("999", 0.0), ("12", 0.0), ("", 0.0)],
)
def test_the_custom_reward_gives_partial_credit(score: Scorer, completion: str, reward: float) -> None:
    assert score(completion, "123", "100+23=") == pytest.approx(reward)


@pytest.mark.parametrize("function", ["by_difficulty", "best_of_group", "by_a_service"])
@pytest.mark.parametrize("trusted", ["true", "false"])
def test_the_other_forms_of_the_custom_reward_judge_a_job(tmp_path: Path, function: str, trusted: str) -> None:
    chosen = [f"reward.scorer=examples/custom_reward.py:{function}", f"reward.trusted={trusted}"]
    summary = Job.load("examples/custom_reward.yaml", [*BRIEF, *chosen, "schedule.updates=1"]).run(tmp_path / "run")
    assert (summary.outcome, summary.groups_dropped, summary.score_failures) == ("finished", 0, 0)


def test_the_other_forms_of_the_custom_reward_do_what_they_say() -> None:
    def judged(function: str, problem: Problem) -> list[float]:
        judge = Judge(RewardConfig(scorer=f"examples/custom_reward.py:{function}", trusted=True))
        judge.ask_all(range(3), ["123", "124", "9"], problem)
        found: dict[object, float] = {}
        while judge.num_pending:
            found |= {key: outcome.reward for key, outcome in judge.collect(1.0)}
        judge.close()
        return [found[index] for index in range(3)]

    easy, hard = Problem("", "123"), Problem("", "123", columns={"difficulty": 2.0})
    assert judged("by_difficulty", easy) == pytest.approx([1.0, 0.2, 0.0])
    assert judged("by_difficulty", hard) == pytest.approx([2.0, 0.4, 0.0])
    assert judged("best_of_group", easy) == [1.0, 0.0, 0.0]
    assert judged("by_a_service", easy) == pytest.approx([1.0, 0.2, 0.0])


@pytest.fixture
def ppo_clip() -> Loss:
    return load_function("algo.loss", "examples/custom_loss.py:ppo_clip")


def test_the_custom_loss_is_ppos_clip(ppo_clip: Loss) -> None:
    """A token that moved too far in the direction of its advantage stops pulling; in the other direction it does not."""
    policy = torch.zeros(4, requires_grad=True)
    ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    tokens = TokenBatch(
        policy, -ratio.log(), advantages, torch.arange(4), entropy_N=torch.zeros(4), num_tokens=4, num_sequences=4
    )
    loss, metrics = ppo_clip(tokens, AlgoConfig())
    (gradient,) = torch.autograd.grad(loss, policy)
    assert gradient.tolist() == pytest.approx([0.0, 1.5 / 4, -0.5 / 4, 0.0])
    assert metrics == pytest.approx({"moved_share": 1.0})
