"""Scorers of one's own: called as they want to be, together or at the same time, here or in workers."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import Config, DatasetConfig, RewardConfig, TaskConfig
from llamarl.errors import ConfigError, InputError
from llamarl.plugins import reference_to
from llamarl.tasks.custom_scorers import BadReward, ScorerRequirements, Signature, rewards_in, signature_of
from llamarl.tasks.datasets import read_examples
from llamarl.tasks.judge import Judge, Judgment
from llamarl.tasks.registry import open_task
from llamarl.tasks.score_lines import read_line
from llamarl.types import Problem

OWN = """
import asyncio, os, time

def legacy(text, gold, question):
    return float(len(text) + 10 * len(gold) + 100 * len(question))

def by_name(prompt, completion, difficulty, answer):
    return difficulty * float(completion == answer) + len(prompt) / 1000

def optional(completion, difficulty=7, scale=1.0):
    return difficulty * scale

def anything(completion, **columns):
    assert set(columns) == {"answer", "prompt", "difficulty", "tags"}, columns
    return float(columns["difficulty"])

def without_answer(completion, difficulty):
    return float(difficulty)

def batched(completions, prompts, answer, difficulty, **columns):
    assert len(prompts) == len(answer) == len(difficulty) == len(completions), columns
    assert set(columns) <= {"prompt", "tags"}, columns
    return [len(completions) + d * float(c == a) for c, a, d in zip(completions, answer, difficulty)]

async def sleeps(completion, answer):
    await asyncio.sleep(0.2)
    return float(completion == answer)

async def batched_sleeps(completions, answer):
    await asyncio.sleep(0.2)
    return [float(c == a) for c, a in zip(completions, answer)]

async def moody(completion, answer):
    if completion == "raise":
        raise ValueError("no idea")
    if completion == "late":
        await asyncio.sleep(60)
    if completion == "block":
        time.sleep(60)
    if completion == "crash":
        os._exit(3)
    await asyncio.sleep(0.01)
    return 1.0

def wrong(completions, answer):
    return {"short": [1.0], "none": None, "nones": [None] * len(completions), "nan": [float("nan")] * len(completions),
            "number": 1.0, "text": "12", "words": ["x"] * len(completions), "digits": ["1.0"] * len(completions)}[answer[0]]

def pid(completion, answer):
    return float(os.getpid())
"""
ROW = Problem("1+1=", "2", columns={"difficulty": 3, "tags": ["x"]})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


def outcomes(judge: Judge, completions: list[str], problem: Problem = ROW) -> list[Judgment]:
    judge.ask_all(range(len(completions)), completions, problem)
    found: dict[Any, Judgment] = {}
    while judge.num_pending:
        found |= dict(judge.collect(1.0))
    return [found[index] for index in range(len(completions))]


@pytest.fixture(params=[True, False], ids=["trusted", "workers"])
def trusted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def judge_for(file: Path, trusted: bool) -> Iterator[Any]:
    opened: list[Judge] = []

    def open_judge(name: str, **settings: Any) -> Judge:
        chosen = {"workers": 1, "retries": 0, "timeout_s": 5.0, **settings}
        opened.append(Judge(RewardConfig(scorer=f"{file}:{name}", trusted=trusted, **chosen)))
        opened[-1].prepare()
        return opened[-1]

    yield open_judge
    for judge in opened:
        judge.close()


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("legacy", [411.0, 412.0]),
        ("by_name", [3.004, 0.004]),
        ("optional", [3.0, 3.0]),
        ("anything", [3.0, 3.0]),
        ("without_answer", [3.0, 3.0]),
        ("batched", [5.0, 2.0]),
        ("sleeps", [1.0, 0.0]),
        ("batched_sleeps", [1.0, 0.0]),
    ],
)
def test_a_function_is_called_with_what_its_parameters_name(judge_for: Any, name: str, rewards: list[float]) -> None:
    judge = judge_for(name)
    found = outcomes(judge, ["2", "22"])
    assert [outcome.status for outcome in found] == ["ok", "ok"], found
    assert [outcome.reward for outcome in found] == pytest.approx(rewards)
    assert judge.score("2", ROW).status == "ok", "one answer alone is judged too"
    assert not judge.take_counts()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("short", "scorer gave 1 reward for 3 completions"),
        ("none", "scorer gave None; for completions it must give a list with one number for each"),
        ("nones", "scorer gave None; it must give a number"),
        ("nan", "scorer gave nan"),
        ("number", "scorer gave 1.0; for completions it must give a list with one number for each"),
        ("text", "scorer gave '12'; for completions it must give a list with one number for each"),
        ("words", "scorer gave 'x'; it must give a number"),
        ("digits", "scorer gave '1.0'; it must give a number"),
    ],
)
def test_a_batch_that_is_judged_wrongly_is_a_failure_of_all_its_answers(judge_for: Any, kind: str, reason: str) -> None:
    judge = judge_for("wrong", retries=1)
    found = outcomes(judge, ["a", "b", "c"], Problem("", kind))
    assert [(outcome.status, outcome.reason) for outcome in found] == [("error", reason)] * 3
    assert judge.take_counts().failures == 2, "every attempt is counted"


def test_128_coroutines_that_sleep_take_less_than_a_second(judge_for: Any) -> None:
    judge = judge_for("sleeps", workers=2, concurrency=64)
    judge.score("2", ROW)  # what is loaded at the first answer
    start_s = time.monotonic()
    for group in range(16):
        judge.ask_all([(group, sample) for sample in range(8)], ["2", "3"] * 4, ROW)
        assert not judge.collect(0.0)
    found: list[Judgment] = []
    while judge.num_pending:
        found += [outcome for _, outcome in judge.collect(1.0)]
    assert time.monotonic() - start_s < 1.0
    assert (len(found), sum(outcome.reward for outcome in found)) == (128, 64.0)


def test_no_more_coroutines_run_at_once_than_allowed(file: Path) -> None:
    running, most = 0, 0

    async def counting(completion: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    judge = Judge(RewardConfig(scorer="python:counting", concurrency=5), given={"python:counting": counting})
    assert all(outcome.reward == 1.0 for outcome in outcomes(judge, ["x"] * 20))
    assert most == 5
    judge.close()


def test_coroutines_are_judged_where_another_loop_is_at_work_as_in_a_notebook(file: Path) -> None:
    async def notebook() -> list[Judgment]:
        judge = Judge(RewardConfig(scorer=f"{file}:sleeps", trusted=True))
        found = outcomes(judge, ["2", "3"])
        judge.close()
        return found

    assert [outcome.reward for outcome in asyncio.run(notebook())] == [1.0, 0.0]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_coroutine_that_fails_takes_no_other_along(judge_for: Any, trusted: bool, retries: int) -> None:
    judge = judge_for("moody", timeout_s=1.5, retries=retries)
    kinds = ["good", "raise", "late", "good", *([] if trusted else ["crash", "good"])]
    found = outcomes(judge, kinds, Problem("", ""))
    by_kind = dict(zip(kinds, found, strict=True))
    assert [one.status for one, kind in zip(found, kinds, strict=True) if kind == "good"] == ["ok"] * kinds.count(
        "good"
    )
    assert by_kind["raise"].status == "error"
    assert by_kind["raise"].reason.startswith("scorer failed: ValueError: no idea (")
    assert "own.py" in by_kind["raise"].trace and by_kind["raise"].trace.endswith("ValueError: no idea")
    assert (by_kind["late"].status, by_kind["late"].reason) == ("timeout", "took longer than 1.5 s")
    assert judge.take_counts().timeouts >= 1


def test_a_coroutine_that_blocks_is_killed_in_a_worker_and_the_others_are_judged(file: Path) -> None:
    judge = Judge(RewardConfig(scorer=f"{file}:moody", workers=1, retries=0, timeout_s=1.0))
    found = outcomes(judge, ["good", "block", "good"], Problem("", ""))
    assert [outcome.status for outcome in found] == ["ok", "timeout", "ok"]
    judge.close()


def test_a_trusted_scorer_runs_in_this_process_and_others_do_not(judge_for: Any, trusted: bool) -> None:
    found = outcomes(judge_for("pid"), ["a", "b"])
    assert {outcome.reward == os.getpid() for outcome in found} == {trusted}


def test_a_trusted_scorer_costs_less_than_50_microseconds_an_answer(file: Path) -> None:
    judge = Judge(RewardConfig(scorer=f"{file}:by_name", trusted=True))
    best_s = 1.0
    for _ in range(5):
        start_s = time.process_time()  # a busy machine changes nothing
        judge.ask_all(range(1000), ["2"] * 1000, ROW)
        assert len(judge.collect()) == 1000
        best_s = min(best_s, (time.process_time() - start_s) / 1000)
    assert best_s < 50e-6


def test_a_trusted_scorer_that_raises_is_a_failure_with_its_traceback(file: Path) -> None:
    def score(completion: str) -> float:
        raise KeyError("nothing")

    judge = Judge(RewardConfig(scorer="python:score", retries=1), given={"python:score": score})
    outcome = judge.score("x", ROW)
    assert outcome.status == "error"
    assert (
        outcome.reason.startswith("scorer failed: KeyError: 'nothing' (")
        and "test_custom_scorers.py:" in outcome.reason
    )
    assert 'raise KeyError("nothing")' in outcome.trace
    assert judge.take_counts().failures == 2


def test_a_problem_without_a_column_that_is_needed_is_a_failure_that_counts(judge_for: Any) -> None:
    judge = judge_for("by_name")
    found = outcomes(judge, ["a", "b"], Problem("", "2", columns={"level": 1}))
    assert [outcome.status for outcome in found] == ["error", "error"]
    assert (
        "asks for 'difficulty', which is no column of the data; there are: answer, completion, level" in found[0].reason
    )
    assert judge.take_counts().failures == 2


def test_own_scorers_are_summed_with_others(file: Path, trusted: bool) -> None:
    combine = {f"{file}:batched": 1.0, f"{file}:sleeps": 10.0, f"{file}:by_name": 100.0, "exact": 1000.0}
    judge = Judge(RewardConfig(combine=combine, workers=2, trusted=trusted, retries=0))
    assert [one.reward for one in outcomes(judge, ["2", "3"])] == pytest.approx([5 + 10 + 300.4 + 1000, 2 + 0.4])
    judge.close()


# What functions ask for


def test_signatures() -> None:
    def score(completion: str, difficulty: int, tag: str = "x") -> float:
        return 0.0

    assert signature_of("f", score) == Signature(by_name=True, required=("completion", "difficulty"), optional=("tag",))
    assert signature_of("f", lambda *texts: 0.0) == Signature()
    with pytest.raises(ConfigError, match=r"f has verl's parameters \(ground_truth, solution_str\); here they are"):
        signature_of("f", lambda data, solution_str, ground_truth: 0.0)
    assert signature_of("f", functools.partial(lambda scale, a, b, c: 0.0, 1)) == Signature()

    class Scorer:
        async def __call__(self, completions: list[str]) -> list[float]:
            return []

    assert signature_of("f", Scorer()) == Signature(
        by_name=True, batched=True, is_async=True, required=("completions",)
    )


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda text: 0.0, r"cannot be called with \(completion, answer, prompt\)"),
        (lambda a, b, c, d: 0.0, r"cannot be called with \(completion, answer, prompt\)"),
        (lambda completion, completions: 0.0, "both 'completion' and 'completions'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(function: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        signature_of("my.py:f", function)


def test_a_reward_is_a_finite_number() -> None:
    assert rewards_in(True, Signature(), 1) == (1.0,)
    assert rewards_in((0, 1), Signature(batched=True), 2) == (0.0, 1.0)
    wrong: list[Any] = [None, "half", float("inf"), [1.0], {}]
    for bad in wrong:
        with pytest.raises(BadReward, match="scorer gave"):
            rewards_in(bad, Signature(), 1)


def data(folder: Path, *rows: dict[str, Any]) -> DatasetConfig:
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return DatasetConfig(kind="jsonl", path=str(folder / "train.jsonl"), held_out=1e-9)


def test_rows_carry_only_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "answer": "2", "difficulty": 3, "essay": "x" * 10_000, "tags": ["a"]}
    source = data(tmp_path, row)
    assert read_examples(source).train[0].columns == {}
    assert read_examples(source, ScorerRequirements({"difficulty": "f"})).train[0].columns == {"difficulty": 3}
    assert read_examples(source, ScorerRequirements(optional=frozenset({"tags", "no"}))).train[0].columns == {
        "tags": ["a"]
    }
    everything = read_examples(source, ScorerRequirements(everything=True)).train[0].columns
    assert set(everything) == {"difficulty", "essay", "tags"}, "prompt and answer travel anyway"


def test_a_column_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, file: Path, trusted: bool) -> None:
    source = data(tmp_path, {"prompt": "a", "answer": "b", "dificulty": 1})
    config = Config(
        task=TaskConfig(kind="jsonl", path=source.path), reward=RewardConfig(scorer=f"{file}:by_name", trusted=trusted)
    )
    with pytest.raises(ConfigError) as refused:
        open_task(config)
    told = str(refused.value)
    assert f"reward.scorer: {file}:by_name asks for 'difficulty', which is no column of the data" in told
    assert "there are: answer, completion, dificulty, prompt" in told and "train.jsonl:1" in told


def test_arithmetic_has_no_columns(file: Path) -> None:
    with pytest.raises(ConfigError, match="asks for 'difficulty'"):
        open_task(Config(reward=RewardConfig(scorer=f"{file}:by_name", trusted=True)))


def test_rows_need_no_answer_where_no_scorer_does(tmp_path: Path, file: Path) -> None:
    source = data(tmp_path, {"prompt": "a", "difficulty": 1}, {"prompt": "b", "difficulty": 2})
    task = TaskConfig(kind="jsonl", path=source.path, held_out=1e-9)
    found = open_task(Config(task=task, reward=RewardConfig(scorer=f"{file}:without_answer", trusted=True))).problem(0)
    assert (found.answer, set(found.columns)) == ("", {"difficulty"})
    with pytest.raises(InputError, match="no field 'answer'"):
        open_task(Config(task=task, reward=RewardConfig(scorer=f"{file}:by_name", trusted=True)))
    with pytest.raises(InputError, match="no field 'answer'"):
        open_task(Config(task=task, reward=RewardConfig(combine={f"{file}:without_answer": 1.0, "exact": 1.0})))


def test_a_column_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    source = data(tmp_path, {"prompt": "a", "answer": "b", "big": 2**80})
    with pytest.raises(InputError, match=r"train\.jsonl:1: a column .* cannot be carried"):
        read_examples(source, ScorerRequirements(everything=True))


def test_lines_to_score_bring_their_columns() -> None:
    line = json.dumps({"completion": "x", "difficulty": 2, "other": 1}).encode()
    completion, problem = read_line(line, "exact", ScorerRequirements({"difficulty": "f"}, answer=False))
    assert (completion, problem.answer, problem.columns) == ("x", "", {"difficulty": 2})
    with pytest.raises(ValueError, match="asks for 'level'"):
        read_line(line, "exact", ScorerRequirements({"level": "f"}, answer=False))


def test_trust_needs_somebody_to_trust() -> None:
    with pytest.raises(ConfigError, match=r"reward\.trusted: cannot take effect"):
        Judge(RewardConfig(scorer="exact", trusted=True))


def test_a_function_at_the_top_of_a_file_can_be_referred_to() -> None:
    assert reference_to(data) == f"{__file__}:data"
    assert reference_to(lambda: 0) == ""
    assert reference_to(functools.partial(data)) == ""
    assert reference_to(Judge.score) == ""
