"""Documents say what an update learns from: which tokens, what they are worth, and who sampled them."""

from __future__ import annotations

import pytest
from helpers.groups import completion, rollout_group
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llamarl.algo.advantages import TOKEN_ADVANTAGES, group_advantages
from llamarl.algo.batch import Document, document_of, make_documents
from llamarl.config import AlgoConfig
from llamarl.errors import OwnCodeFailed
from llamarl.types import Completion, Rollout, RolloutGroup, bytes_to_floats, bytes_to_tokens, floats_to_bytes

VERSION = 9
KEEP = AlgoConfig(zero_variance="keep")
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


def as_said(document: Document) -> tuple[list[int], int, list[float], list[int]]:
    return (
        document.tokens.tolist(),
        document.num_prompt_tokens,
        document.behavior_logprobs.tolist(),
        document.staleness.tolist(),
    )


def expected(groups: list[RolloutGroup]) -> list[tuple[list[int], int, list[float], list[int]]]:
    found = []
    for group in groups:
        prompt = bytes_to_tokens(group.prompt.prompt_tokens).tolist()
        for rollout in group.rollouts:
            answer = rollout.completion
            versions = [run.version for run in answer.versions for _ in range(run.count)]
            found.append(
                (
                    prompt + bytes_to_tokens(answer.tokens).tolist(),
                    len(prompt),
                    bytes_to_floats(answer.behavior_logprobs).tolist(),
                    [VERSION - version for version in versions],
                )
            )
    return found


@given(st.lists(rollout_groups(), min_size=1, max_size=4), st.booleans())
def test_they_hold_what_the_rollouts_hold_in_their_order(groups: list[RolloutGroup], skip: bool) -> None:
    algo = AlgoConfig(zero_variance="skip" if skip else "keep")
    kept = [group for group in groups if not skip or len(set(group.rewards)) > 1]
    documents = make_documents(groups, version=VERSION, algo=algo)
    assert [as_said(document) for document in documents] == expected(kept)
    worth = [advantage for group in kept for advantage in group_advantages(group.rewards)]
    assert [document.advantages.tolist() for document in documents] == [
        pytest.approx([one] * document.num_answer_tokens) for document, one in zip(documents, worth, strict=True)
    ]


MIXED = rollout_group([1, 2], [(completion([3, 4]), 1.0), (completion([5]), 0.0)], ordinal=0)
EQUAL = rollout_group([6], [(completion([7, 8, 9]), 1.0), (completion([10]), 1.0)], ordinal=1)


def advantages(groups: list[RolloutGroup], algo: AlgoConfig) -> list[float]:
    return [float(document.advantages[0]) for document in make_documents(groups, version=0, algo=algo)]


def test_zero_variance_groups_are_kept_with_zero_advantage_or_skipped() -> None:
    assert advantages([MIXED, EQUAL], KEEP) == [0.5, -0.5, 0.0, 0.0]
    assert advantages([MIXED, EQUAL], AlgoConfig(zero_variance="skip")) == [0.5, -0.5]
    assert advantages([EQUAL], AlgoConfig(zero_variance="skip")) == advantages([], KEEP) == []


def test_the_advantage_is_the_losss_own_or_the_one_asked_for() -> None:
    group = rollout_group([1], [(completion([2]), 3.0), (completion([3]), 0.0), (completion([4]), 0.0)])
    assert advantages([group], AlgoConfig(loss="aipo")) == [2.0, -1.0, -1.0]
    assert advantages([group], AlgoConfig(loss="rloo")) == [3.0, -1.5, -1.5]
    assert advantages([group], AlgoConfig(loss="rloo", advantage="mean")) == [2.0, -1.0, -1.0]


def cut_off(group: RolloutGroup, index: int) -> RolloutGroup:
    rollouts = list(group.rollouts)
    answer = replace(rollouts[index].completion, truncated=True)
    rollouts[index] = Rollout(answer, rollouts[index].reward)
    return RolloutGroup(group.prompt, tuple(rollouts))


def test_answers_that_were_cut_off_are_kept_masked_or_penalized() -> None:
    group = cut_off(MIXED, 1)
    assert advantages([group], AlgoConfig(overlong="keep")) == [0.5, -0.5]
    assert advantages([group], AlgoConfig(overlong="mask")) == [0.5], "it counts in its group's mean, not in the loss"
    assert advantages([group], AlgoConfig(overlong="penalize", overlong_penalty=1.0)) == [1.0, -1.0]
    assert advantages([cut_off(EQUAL, 0)], AlgoConfig(overlong="penalize", overlong_penalty=1.0)) == [-0.5, 0.5]


def test_an_answer_without_tokens_counts_in_its_groups_mean_and_nowhere_else() -> None:
    group = rollout_group([1], [(completion([2]), 1.0), (completion([]), 0.0)])
    assert advantages([group], KEEP) == [0.5]


def test_staleness_is_counted_token_by_token() -> None:
    group = rollout_group([1], [(completion([2, 3, 4], versions=[5, 5, 7]), 1.0), (completion([5], versions=[7]), 0.0)])
    documents = make_documents([group], version=8, algo=KEEP)
    assert [document.staleness.tolist() for document in documents] == [[3, 3, 1], [1]]


def test_columns_of_other_roles_come_along() -> None:
    rollouts = tuple(
        Rollout(one.completion, one.reward, {"values": floats_to_bytes([float(i)] * one.completion.num_tokens)})
        for i, one in enumerate(MIXED.rollouts)
    )
    documents = make_documents([RolloutGroup(MIXED.prompt, rollouts)], version=0, algo=KEEP)
    assert [document.columns["values"].tolist() for document in documents] == [[0.0, 0.0], [1.0]]


def with_column(group: RolloutGroup, name: str, values: list[list[float]]) -> RolloutGroup:
    pairs = zip(group.rollouts, values, strict=True)
    return RolloutGroup(group.prompt, tuple(replace(one, columns={name: floats_to_bytes(own)}) for one, own in pairs))


@pytest.mark.parametrize("group", [MIXED, EQUAL])
def test_a_role_may_give_each_token_an_advantage_of_its_own(group: RolloutGroup) -> None:
    values = [[0.25 * place - 0.5 for place in range(one.completion.num_tokens)] for one in group.rollouts]
    documents = make_documents([with_column(group, TOKEN_ADVANTAGES, values)], version=0, algo=AlgoConfig())
    assert [document.advantages.tolist() for document in documents] == values
    assert not any(document.columns for document in documents), "it is no column for the loss to ask for by name"


def test_a_group_whose_tokens_are_all_worth_nothing_is_skipped() -> None:
    nothing = with_column(MIXED, TOKEN_ADVANTAGES, [[0.0, 0.0], [0.0]])
    assert make_documents([nothing], version=0, algo=AlgoConfig()) == []


@pytest.mark.parametrize("name", [TOKEN_ADVANTAGES, "values"])
def test_a_column_with_too_few_values_is_refused(name: str) -> None:
    with pytest.raises(OwnCodeFailed, match=f"column '{name}': 1 values for 2 sampled tokens"):
        make_documents([with_column(MIXED, name, [[1.0], [1.0]])], version=0, algo=KEEP)


def test_a_measured_completion_is_worth_nothing() -> None:
    document = document_of(MIXED.prompt, MIXED.rollouts[0].completion, version=0)
    assert (document.tokens.tolist(), document.num_prompt_tokens) == ([1, 2, 3, 4], 2)
    assert document.advantages.tolist() == [0.0, 0.0]
