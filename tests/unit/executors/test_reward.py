"""The reward scores text, and a scorer that fails drops its group with the reason instead of judging it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.groups import completion, prompt_group

from llamarl.config import Config, RewardConfig
from llamarl.executors.executor import UnexpectedMessage
from llamarl.executors.reward import Reward
from llamarl.messages import GroupRefused, GroupResult, LoadWeights, MustStop, Noted, Report, ScoresFailed, WorkOnGroup
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.judge import Judge
from llamarl.types import CompletionGroup, RolloutGroup

OWN = '''
import asyncio, sys, time

def half(completion, answer, prompt):
    return 0.5

async def slowly(completion, answer, prompt):
    await asyncio.sleep(0.01)
    return float(completion == answer)

def arguments(completion, answer, prompt):
    assert (answer, prompt) == ("2", "1+1="), (answer, prompt)
    return float(completion)

def picky(completion, answer, prompt):
    """One function with every fault, chosen by the completion."""
    if completion == "1":
        raise ValueError("two\\nlines " + "x" * 10_000)
    if completion == "2":
        sys.exit("good-bye")
    if completion == "3":
        return None
    if completion == "4":
        return "half"
    if completion == "5":
        return float("nan")
    if completion == "6":
        return float("-inf")
    if completion == "7":
        time.sleep(60)
    if completion == "8":
        return len("x" * 2**31)
    return 1.0
'''


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Config().model_folder)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def picky(file: Path) -> Iterator[Judge]:
    judge = Judge(RewardConfig(scorer=f"{file}:picky", timeout_s=1.0, retries=0, workers=1))
    yield judge
    judge.close()


def answers(tokenizer: Tokenizer, *texts: str, ordinal: int = 5) -> CompletionGroup:
    """The prompt of the helper is 1+1=, its answer 2."""
    prompt = prompt_group(tokenizer.encode("1+1="), ordinal=ordinal, samples=len(texts))
    return CompletionGroup(prompt, tuple(completion([*tokenizer.encode(text), *tokenizer.eos_ids]) for text in texts))


def reports_of(reward: Reward, *groups: CompletionGroup) -> list[Report]:
    """Everything it says until it has nothing more to do."""
    reports = [report for group in groups for report in reward.handle(WorkOnGroup(group))]
    while not reward.idle:
        started_s = time.monotonic()
        reports += reward.work()
        assert time.monotonic() - started_s < 1.0, "a slice must be short"
    return reports


def test_every_completion_gets_its_own_reward_without_its_end_token(tokenizer: Tokenizer) -> None:
    reward = Reward(tokenizer, Judge(RewardConfig(scorer="exact")))
    (report,) = reward.handle(WorkOnGroup(answers(tokenizer, "2", "3", "22", "2")))
    assert isinstance(report, GroupResult) and isinstance(report.group, RolloutGroup)
    assert report.group.rewards == (1.0, 0.0, 0.0, 1.0)
    assert reward.idle
    assert (
        tuple(rollout.completion for rollout in report.group.rollouts)
        == answers(tokenizer, "2", "3", "22", "2").completions
    ), "what was sampled goes on untouched"


@pytest.mark.parametrize(
    ("function", "rewards"),
    [("half", (0.5, 0.5, 0.5)), ("slowly", (1.0, 0.0, 0.0)), ("arguments", (2.0, 3.0, 4.5))],
)
def test_a_scorer_of_ones_own_may_be_sync_or_async_and_is_given_completion_answer_and_prompt(
    tokenizer: Tokenizer, file: Path, function: str, rewards: tuple[float, ...]
) -> None:
    judge = Judge(RewardConfig(scorer=f"{file}:{function}", workers=1))
    (report,) = reports_of(Reward(tokenizer, judge), answers(tokenizer, "2", "3", "4.5"))
    assert isinstance(report, GroupResult) and isinstance(report.group, RolloutGroup)
    assert report.group.rewards == rewards
    judge.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1", "scorer failed: ValueError: two lines xxx"),
        ("2", "scorer failed: SystemExit: good-bye"),
        ("3", "scorer gave None; it must give a number"),
        ("4", "scorer gave 'half'; it must give a number"),
        ("5", "scorer gave nan"),
        ("6", "scorer gave -inf"),
        ("7", "scorer took longer than 1 s"),
        ("8", "scorer failed: it used up its memory"),
    ],
)
def test_a_scorer_that_fails_drops_its_group_with_one_short_line(
    tokenizer: Tokenizer, picky: Judge, text: str, reason: str
) -> None:
    logged: list[str] = []
    noted, refused, counted = reports_of(Reward(tokenizer, picky, log=logged.append), answers(tokenizer, "0", text))
    assert isinstance(refused, GroupRefused)
    assert noted == Noted(refused.reason)
    assert len(logged) == 1 and logged[0].startswith(refused.reason)
    assert refused.ordinal == 5
    assert refused.reason.startswith(reason)
    assert len(refused.reason) < 400
    assert "\n" not in refused.reason
    assert counted == (ScoresFailed(0, 1) if text == "7" else ScoresFailed(1, 0))
    (after,) = reports_of(Reward(tokenizer, picky), answers(tokenizer, "0", "9"))
    assert isinstance(after, GroupResult), "the next answer is judged as if nothing had happened"


def test_a_failure_is_tried_again_and_every_attempt_is_counted(tokenizer: Tokenizer, file: Path) -> None:
    judge = Judge(RewardConfig(scorer=f"{file}:picky", retries=2, workers=1))
    reports = reports_of(Reward(tokenizer, judge), answers(tokenizer, "0", "1"))
    assert sum(report.failures for report in reports if isinstance(report, ScoresFailed)) == 3
    assert sum(isinstance(report, GroupRefused) for report in reports) == 1
    judge.close()


def test_groups_are_judged_side_by_side_and_each_is_whole(tokenizer: Tokenizer, picky: Judge) -> None:
    groups = [answers(tokenizer, "0", "9", "0", ordinal=ordinal) for ordinal in range(6)]
    groups.append(answers(tokenizer, "0", "5", ordinal=6))
    reports = reports_of(Reward(tokenizer, picky), *groups)
    scored = {report.group.ordinal for report in reports if isinstance(report, GroupResult)}
    assert scored == set(range(6))
    assert [report.ordinal for report in reports if isinstance(report, GroupRefused)] == [6]


def test_too_large_a_share_of_failures_stops_the_job(tokenizer: Tokenizer, picky: Judge) -> None:
    reward = Reward(tokenizer, picky, max_failure_share=0.02)
    assert not any(isinstance(report, MustStop) for report in reports_of(reward, answers(tokenizer, "5", "5")))
    (stop,) = [report for report in reports_of(reward, answers(tokenizer, "5")) if isinstance(report, MustStop)]
    assert stop.reason == (
        "3 of the last 3 answers could not be judged; more than reward.max_failure_share=0.02; the last: scorer gave nan"
    )


def test_the_same_failure_is_noted_and_logged_once(tokenizer: Tokenizer, picky: Judge, file: Path) -> None:
    logged: list[str] = []
    reports = reports_of(Reward(tokenizer, picky, log=logged.append), answers(tokenizer, *["1"] * 4, "2", "2"))
    noted = [report.text for report in reports if isinstance(report, Noted)]
    assert [text.rpartition("(")[2] for text in noted] == [f"{file}:18)", f"{file}:20)"]
    assert [text.count("Traceback (most recent call last)") for text in logged] == [1, 1]


def test_in_a_deterministic_job_a_time_out_stops_it(tokenizer: Tokenizer, picky: Judge) -> None:
    reports = reports_of(Reward(tokenizer, picky, deterministic=True), answers(tokenizer, "7"))
    assert any(isinstance(report, MustStop) and "took longer than 1 s" in report.reason for report in reports)


def test_a_message_for_another_role_is_not_answered(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnexpectedMessage, match="a reward cannot handle LoadWeights"):
        list(Reward(tokenizer, Judge(RewardConfig())).handle(LoadWeights(0)))
