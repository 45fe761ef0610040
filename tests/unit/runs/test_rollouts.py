"""Kept rollouts of a real job, as a reader sees them: they agree with what the trainer and the scorer did."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.killing import TINY

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.errors import InputError
from llamarl.runs.rollouts import KeptGroup, RolloutReader

SETTINGS = (*TINY, "engine=inline", "schedule.updates=3", "evaluate.prompts=0", "snapshots.every=1")


@pytest.fixture(scope="module")
def reader(run: Path) -> RolloutReader:
    return RolloutReader(run, load_config(run / "config.yaml"))


@pytest.fixture(scope="module")
def groups(reader: RolloutReader) -> list[KeptGroup]:
    return [group for update in reader.updates for group in reader.groups(update)]


def test_all_groups_of_all_updates_are_there_although_snapshots_cover_them(
    reader: RolloutReader, groups: list[KeptGroup]
) -> None:
    assert reader.updates == [0, 1, 2]
    assert [reader.num_groups(update) for update in reader.updates] == [4, 4, 4]
    assert [group.ordinal for group in groups] == [*range(12)]
    assert all(len(group.rollouts) == 4 and group.answer and group.answer.isdigit() for group in groups)
    assert all(group.prompt.rstrip().endswith("=") for group in groups)


def test_rewards_lengths_and_log_probs_are_those_of_the_metrics(run: Path, groups: list[KeptGroup]) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        here = [rollout for group in groups if group.update == row["update"] for rollout in group.rollouts]
        assert row["reward"] == pytest.approx(np.mean([rollout.reward for rollout in here]))
        assert row["answer_tokens"] == np.mean([rollout.sampled.sum() for rollout in here])
        trained = [rollout for rollout in here if rollout.status == "trained"]
        assert row["trained_tokens"] == sum(rollout.sampled.sum() for rollout in trained)
        if not trained:
            continue
        ratio = np.concatenate([np.exp(one.policy_logprobs - one.behavior_logprobs) for one in trained])
        assert row["ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-4)
        assert row["ratio_max"] == pytest.approx(ratio.max(), rel=1e-4)


def test_what_was_given_as_the_answer_explains_the_reward(groups: list[KeptGroup]) -> None:
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    assert {rollout.reward for _, rollout in rollouts} == {0.0, 1.0}
    for group, rollout in rollouts:
        assert (rollout.given == group.answer) == bool(rollout.reward), rollout.text


def test_advantages_are_zero_exactly_where_nothing_was_learned(groups: list[KeptGroup]) -> None:
    for group in groups:
        flat = len(set(group.rewards)) == 1
        for rollout in group.rollouts:
            assert rollout.status == ("left out" if flat else "trained")
            assert ("algo.zero_variance" in rollout.reason) == flat
            assert (rollout.advantage == 0) == flat
            assert np.isnan(rollout.policy_logprobs).all() == flat
        assert flat or rollout.advantage == pytest.approx(rollout.reward - np.mean(group.rewards))


def test_pieces_are_the_text(reader: RolloutReader, groups: list[KeptGroup]) -> None:
    for group in groups:
        assert "".join(reader.pieces(group.prompt_tokens.tolist())) == group.prompt


def test_pages_and_single_groups(reader: RolloutReader) -> None:
    assert [group.ordinal for group in reader.groups(1, start=1, count=2)] == [5, 6]
    assert [place.ordinal for place in reader.places(2)] == [8, 9, 10, 11]
    assert reader.find(9).update == 2
    assert [*reader.groups(99)] == []
    with pytest.raises(InputError, match="group 99 is not there"):
        reader.find(99)


def test_scores_by_part_and_tool_replies_are_kept(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("def tool(said, turns):\n    return '7='\n")
    more = [f"conversation.tool={tmp_path / 'tool.py'}:tool", "conversation.max_turns=2", "conversation.workers=1"]
    more += ["reward.combine={numeric: 1.0, length: 0.5}", "reward.max_chars=4", "schedule.updates=1"]
    Job(load_config(None, [*SETTINGS, *more])).run(tmp_path / "run")
    reader = RolloutReader(tmp_path / "run", load_config(tmp_path / "run" / "config.yaml"))
    rollouts = [rollout for group in reader.groups(0) for rollout in group.rollouts]
    for rollout in rollouts:
        assert rollout.reward == pytest.approx(rollout.parts["numeric"] + 0.5 * rollout.parts["length"])
        assert (rollout.versions[~rollout.sampled] == -1).all() and (rollout.versions[rollout.sampled] == 0).all()
        assert np.isnan(rollout.behavior_logprobs[~rollout.sampled]).all()
        assert not np.isnan(rollout.behavior_logprobs[rollout.sampled]).any()
    talks = [rollout for rollout in rollouts if len(rollout.turns) > 1]
    assert talks, "no answer called the tool"
    for rollout in talks:
        assert [turn.role for turn in rollout.turns][:2] == ["model", "tool"]
        assert not rollout.sampled.all()


def test_a_group_that_cannot_be_answered_says_why(tmp_path: Path) -> None:
    lengths = ["generator.max_prompt_tokens=5", "schedule.updates=2"]
    Job(load_config(None, [*SETTINGS, *lengths])).run(tmp_path / "run")
    reader = RolloutReader(tmp_path / "run", load_config(tmp_path / "run" / "config.yaml"))
    groups = [group for update in reader.updates for group in reader.groups(update)]
    assert len(groups) == 8
    dropped = [group for group in groups if group.dropped]
    assert 0 < len(dropped) < 8, "choose another length"
    for group in dropped:
        assert "tokens" in group.dropped and not group.rollouts and group.prompt
