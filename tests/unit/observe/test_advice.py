"""A run that cannot learn gets advice on the reason and the setting to change; a run that learns gets none."""

from __future__ import annotations

import pytest

from llamarl.config import AlgoConfig, Config, ScheduleConfig, TrainerConfig
from llamarl.config.file import load_config
from llamarl.observe.advice import Advisor, advice_before

CONFIG = Config(schedule=ScheduleConfig(updates=40, groups_per_update=8), algo=AlgoConfig(overlong="mask"))
WELL = {
    "groups": 8.0,
    "reward": 0.4,
    "zero_variance_share": 0.3,
    "truncated_share": 0.1,
    "answer_tokens": 20.0,
    "trained_tokens": 800.0,
}


@pytest.mark.parametrize(
    ("row", "setting"),
    [
        ({"zero_variance_share": 1.0, "reward": 0.0, "trained_tokens": 0.0}, "schedule.samples_per_group"),
        ({"truncated_share": 1.0}, "generator.max_new_tokens"),
        ({"trained_tokens": 0.0}, "algo.overlong=mask"),
        ({"groups": 2.0}, "generator.max_prompt_tokens"),
        ({"replacements_used_up": 1.0, "no_variance_share": 0.8}, "schedule.dynamic_sampling"),
    ],
    ids=["no variance", "cut off", "no tokens", "dropped", "budget"],
)
def test_what_stands_in_the_way_is_told_once_and_at_the_end(row: dict[str, float], setting: str) -> None:
    advisor = Advisor(CONFIG)
    said = [line for _ in range(30) for line in advisor.hear({**WELL, **row})]
    assert len(said) == 1 and setting in said[0]
    assert advisor.final() == said
    short = Advisor(CONFIG)
    assert not short.hear({**WELL, **row})
    assert short.final() == said, "a run of one update hears it at its end"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["task.kind=gsm8k"], "set reward.answer_from,"),
        ([], "set reward.scorer to numeric, or to a function of your own,"),
        (["reward.scorer=mine.py:score"], "parts of an answer a part of the reward,"),
    ],
)
def test_what_is_advised_can_be_done(settings: list[str], told: str) -> None:
    advisor = Advisor(load_config(None, settings))
    advisor.hear({**WELL, "zero_variance_share": 1.0})
    assert told in advisor.final()[0]
    if "answer_from" in told:
        load_config(None, [*settings, "reward.answer_from=boxed"])


def test_a_policy_that_gets_worse_hears_of_its_learning_rate_and_nothing_else() -> None:
    advisor = Advisor(CONFIG)
    said = [line for update in range(60) for line in advisor.hear({**WELL, "reward": max(0.0, 0.5 - update / 60)})]
    assert len(said) == 1 and "the policy got worse: mean reward 0.425" in said[0] and "trainer.lr" in said[0]
    for _ in range(20):
        advisor.hear({**WELL, "reward": 0.0, "zero_variance_share": 1.0, "truncated_share": 1.0})
    assert len(advisor.final()) == 1 and "trainer.lr" in advisor.final()[0]


def test_a_run_that_learns_hears_nothing() -> None:
    advisor = Advisor(CONFIG)
    assert not [line for _ in range(30) for line in advisor.hear(WELL)]
    assert not advisor.final() and not Advisor(CONFIG).final()


def test_a_warm_up_longer_than_the_run_is_told_before_it_begins() -> None:
    (told,) = advice_before(Config(schedule=ScheduleConfig(updates=5), trainer=TrainerConfig(warmup_updates=10)))
    assert "trainer.warmup_updates=10" in told
    assert not advice_before(CONFIG)


SURE = {**WELL, "zero_variance_share": 1.0, "sampled_logprob": -0.001}


@pytest.mark.parametrize(
    ("first", "row", "told"),
    [
        (
            {},
            {"reward": 0.3},
            "the same answer each time: the mean log-prob of its tokens is -0.0010 (at first -0.50), the",
        ),
        ({"sampled_logprob": -0.05}, {"reward": 0.3}, "every answer of the last updates got the same reward, 0.300"),
        ({}, {"reward": 0.9}, "every answer of the last updates got the same reward, 0.900"),
        ({}, {"reward": 0.5, "sampled_logprob": -0.5}, "every answer of the last updates got the same reward, 0.500"),
        ({"sampled_logprob": -0.01, "reward": 0.0}, {"reward": 0.0}, "if the format is missed"),
    ],
    ids=["collapsed", "sure from the start", "solved", "one reward for all", "format"],
)
def test_no_variance_is_told_by_what_it_comes_from(first: dict[str, float], row: dict[str, float], told: str) -> None:
    """Not "harder data" where the policy gives one answer to everything, or the scorer one reward."""
    rows = [{**WELL, "sampled_logprob": -0.5, **first}, *[{**SURE, **row}] * 10]
    said = advice_of(CONFIG, rows)
    assert len(said) == 1 and told in said[0], said


@pytest.mark.parametrize("settings", [["teacher.path=tiny", "algo.reward_weight=0"], ["algo.advantage=gae"]])
def test_where_groups_without_variance_teach_nothing_is_said_of_them(settings: list[str]) -> None:
    config = load_config(None, [*settings, "schedule.groups_per_update=8"])
    assert not advice_of(config, [{**WELL, "sampled_logprob": -0.5}, *[{**SURE, "reward": 0.3}] * 10])


def test_groups_that_are_all_right_or_all_wrong_are_no_sign_of_one_reward_for_all() -> None:
    rows = [{**SURE, "sampled_logprob": -0.5, "reward": reward / 8} for reward in (3, 4, 5, 3, 4) * 2]
    assert "if the format is missed" in advice_of(CONFIG, rows)[0]


def advice_of(config: Config, rows: list[dict[str, float]]) -> list[str]:
    advisor = Advisor(config)
    for row in rows:
        advisor.hear(row)
    return advisor.final()
