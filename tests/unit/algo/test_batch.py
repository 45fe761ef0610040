"""A TrainBatch says the same as one sequence at a time would: which state predicts which token, and what it is worth."""

from __future__ import annotations

import pytest
import torch
from helpers.groups import completion, rollout_group
from hypothesis import given
from hypothesis import strategies as st

from llamarl.algo.advantages import group_advantages
from llamarl.algo.batch import TrainBatch, make_batch
from llamarl.types import Completion, RolloutGroup, bytes_to_floats, bytes_to_tokens

VERSION = 9
token_ids = st.integers(0, 16)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(st.lists(token_ids, min_size=1, max_size=6))
    logprobs = draw(st.lists(st.floats(-20, 0, width=32), min_size=len(tokens), max_size=len(tokens)))
    versions = sorted(draw(st.lists(st.integers(0, VERSION), min_size=len(tokens), max_size=len(tokens))))
    return completion(tokens, logprobs, versions)


@st.composite
def rollout_groups(draw: st.DrawFn) -> RolloutGroup:
    answers = st.tuples(completions(), st.sampled_from([0.0, 0.5, 1.0]))
    return rollout_group(
        draw(st.lists(token_ids, min_size=1, max_size=5)), draw(st.lists(answers, min_size=2, max_size=4))
    )


def one_at_a_time(groups: list[RolloutGroup], *, skip: bool) -> list[tuple[list[int], int, int, float, float, int]]:
    """For every completion token: the tokens before it, the column that sees them, itself, mu, A and staleness."""
    found = []
    for group in groups:
        advantages = group_advantages(group.rewards)
        if skip and len(set(group.rewards)) == 1:
            continue
        prompt = bytes_to_tokens(group.prompt.prompt_tokens).tolist()
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            answer = bytes_to_tokens(rollout.completion.tokens).tolist()
            logprobs = bytes_to_floats(rollout.completion.behavior_logprobs).tolist()
            versions = [run.version for run in rollout.completion.versions for _ in range(run.count)]
            for at, token in enumerate(answer):
                before = prompt + answer[:at]
                found.append((before, len(before) - 1, token, logprobs[at], advantage, VERSION - versions[at]))
    return found


def read_back(batch: TrainBatch) -> list[tuple[list[int], int, int, float, float, int]]:
    found = []
    for n in range(batch.num_tokens):
        row, column = int(batch.rows_N[n]), int(batch.columns_N[n])
        found.append(
            (
                batch.tokens_BT[row, : column + 1].tolist(),
                column,
                int(batch.targets_N[n]),
                float(batch.behavior_logprobs_N[n]),
                float(batch.advantages_N[n]),
                int(batch.staleness_N[n]),
            )
        )
    return found


@given(st.lists(rollout_groups(), min_size=1, max_size=4), st.booleans())
def test_it_equals_one_sequence_at_a_time(groups: list[RolloutGroup], skip: bool) -> None:
    batch, expected = make_batch(groups, version=VERSION, skip_zero_variance=skip), one_at_a_time(groups, skip=skip)
    assert (batch is None) == (not expected)
    if batch is None:
        return
    for found, wanted in zip(read_back(batch), expected, strict=True):
        assert found[:4] == wanted[:4]
        assert found[4] == pytest.approx(wanted[4])
        assert found[5] == wanted[5]


@given(st.lists(rollout_groups(), min_size=1, max_size=4))
def test_the_token_after_the_predicting_state_is_the_target(groups: list[RolloutGroup]) -> None:
    batch = make_batch(groups, version=VERSION)
    assert batch is not None
    assert torch.equal(batch.tokens_BT[batch.rows_N, batch.columns_N + 1], batch.targets_N)
    assert torch.equal(batch.positions_BT, torch.arange(batch.tokens_BT.shape[1]).expand_as(batch.tokens_BT))


MIXED = rollout_group([1, 2], [(completion([3, 4]), 1.0), (completion([5]), 0.0)], ordinal=0)
EQUAL = rollout_group([6], [(completion([7, 8, 9]), 1.0), (completion([10]), 1.0)], ordinal=1)


def test_kept_zero_variance_groups_count_in_the_denominator_with_zero_advantage() -> None:
    batch = make_batch([MIXED, EQUAL], version=0)
    assert batch is not None
    assert batch.advantages_N.tolist() == [0.5, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert batch.with_policy(torch.zeros(7)).num_tokens == 7


def test_skipped_zero_variance_groups_leave_the_denominator_too() -> None:
    batch = make_batch([MIXED, EQUAL], version=0, skip_zero_variance=True)
    assert batch is not None
    assert batch.advantages_N.tolist() == [0.5, 0.5, -0.5]
    assert batch.with_policy(torch.zeros(3)).num_tokens == 3
    assert batch.tokens_BT.shape[0] == 2


def test_nothing_is_left_when_all_groups_are_skipped_or_there_are_none() -> None:
    assert make_batch([EQUAL], version=0, skip_zero_variance=True) is None
    assert make_batch([], version=0) is None
    assert make_batch([EQUAL], version=0) is not None


def test_staleness_is_counted_token_by_token() -> None:
    group = rollout_group([1], [(completion([2, 3, 4], versions=[5, 5, 7]), 1.0), (completion([5], versions=[7]), 0.0)])
    batch = make_batch([group], version=8)
    assert batch is not None
    assert batch.staleness_N.tolist() == [3, 3, 1, 1]


def test_the_loss_sees_every_completion_as_a_sequence_of_its_own() -> None:
    batch = make_batch([MIXED, EQUAL], version=0)
    assert batch is not None
    tokens = batch.with_policy(torch.zeros(7))
    assert tokens.sequence_N.tolist() == [0, 0, 1, 2, 2, 2, 3]
