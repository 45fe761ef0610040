"""The reward scores text, and a scorer that fails drops its group with the reason instead of judging it."""

from __future__ import annotations

import sys
from typing import NoReturn

import pytest
from helpers.groups import completion, prompt_group

from llamarl.config import Config
from llamarl.executors.executor import UnexpectedMessage
from llamarl.executors.reward import Reward
from llamarl.messages import GroupRefused, GroupResult, LoadWeights, Report, WorkOnGroup
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.scorers import Scorer, exact
from llamarl.types import CompletionGroup, RolloutGroup


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Config().model_folder)


def answers(tokenizer: Tokenizer, *texts: str) -> CompletionGroup:
    """The prompt of the helper is 1+1=, its answer 2."""
    prompt = prompt_group(tokenizer.encode("1+1="), ordinal=5, samples=len(texts))
    return CompletionGroup(prompt, tuple(completion([*tokenizer.encode(text), *tokenizer.eos_ids]) for text in texts))


def score(tokenizer: Tokenizer, scorer: Scorer, *texts: str) -> Report:
    (report,) = Reward(tokenizer, scorer).handle(WorkOnGroup(answers(tokenizer, *texts)))
    return report


def test_every_completion_gets_its_own_reward_without_its_end_token(tokenizer: Tokenizer) -> None:
    report = score(tokenizer, exact, "2", "3", "22", "2")
    assert isinstance(report, GroupResult) and isinstance(report.group, RolloutGroup)
    assert report.group.rewards == (1.0, 0.0, 0.0, 1.0)
    assert (
        tuple(rollout.completion for rollout in report.group.rollouts)
        == answers(tokenizer, "2", "3", "22", "2").completions
    ), "what was sampled goes on untouched"


def test_a_scorer_is_given_completion_answer_and_prompt(tokenizer: Tokenizer) -> None:
    seen = []

    def scorer(*args: str) -> float:
        seen.append(args)
        return 0.5

    score(tokenizer, scorer, "7", "8")
    assert seen == [("7", "2", "1+1="), ("8", "2", "1+1=")]


def fails(*args: str) -> NoReturn:
    raise ValueError("two\nlines " + "x" * 10_000)


def leaves(*args: str) -> NoReturn:
    sys.exit("good-bye")


@pytest.mark.parametrize(
    ("scorer", "reason"),
    [
        (fails, "scorer failed: ValueError: two lines xxx"),
        (leaves, "scorer failed: SystemExit: good-bye"),
        (lambda *args: None, "scorer failed: TypeError: "),
        (lambda completion: 1.0, "scorer failed: TypeError: "),
        (lambda *args: "half", "scorer failed: ValueError: "),
        (lambda *args: float("nan"), "scorer gave nan"),
        (lambda *args: float("-inf"), "scorer gave -inf"),
    ],
)
def test_a_scorer_that_fails_drops_its_group_with_one_short_line(
    tokenizer: Tokenizer, scorer: Scorer, reason: str
) -> None:
    report = score(tokenizer, scorer, "2", "3")
    assert isinstance(report, GroupRefused)
    assert report.ordinal == 5
    assert report.reason.startswith(reason)
    assert len(report.reason) < 300
    assert "\n" not in report.reason


def test_a_message_for_another_role_is_not_answered(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnexpectedMessage, match="a reward cannot handle LoadWeights"):
        list(Reward(tokenizer, exact).handle(LoadWeights(0)))
