"""Token metrics by hand, and from the totals of several ranks."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.groups import completion, rollout_group
from msgspec.structs import replace

from llamarl.algo.metrics import TokenMeasures, describe_groups, token_metrics, token_totals
from llamarl.types import Given, tokens_to_bytes

RATIO = torch.tensor([0.5, 1.0, 6.0, 8.0], dtype=torch.float64)


def measures(ratio: torch.Tensor, staleness: list[int], fresh: list[bool]) -> TokenMeasures:
    policy = torch.full_like(ratio, -1.0)
    return TokenMeasures(
        policy, policy - ratio.log(), torch.arange(len(ratio)) * 0.5, torch.tensor(staleness), torch.tensor(fresh)
    )


def found_from(*ranks: TokenMeasures) -> dict[str, float]:
    staleness = sorted({int(value) for rank in ranks for value in rank.staleness_N})
    totals = [token_totals(rank, rho=4.0, staleness=staleness) for rank in ranks]
    sums = {name: sum(one[name].item() for one, _ in totals) for name in totals[0][0]}
    return token_metrics(sums, max(highest.item() for _, highest in totals), staleness)


def k3(ratio: float) -> float:
    return ratio - 1 - math.log(ratio)


def test_by_hand() -> None:
    found = found_from(measures(RATIO, [0, 0, 1, 3], [True, False, False, False]))
    assert found == pytest.approx(
        {
            "trained_tokens": 4.0,
            "ratio_mean": 15.5 / 4,
            "ratio_max": 8.0,
            "effective_sample_size": (0.5 + 1 + 4 + 4) ** 2 / (0.25 + 1 + 16 + 16) / 4,
            "entropy": 0.75,
            "kl_behavior": sum(map(k3, RATIO.tolist())) / 4,
            "staleness_mean": 1.0,
            "staleness_max": 3.0,
            "staleness_share_0": 0.5,
            "staleness_share_1": 0.25,
            "staleness_share_3": 0.25,
            "kl_behavior_s0": (k3(0.5) + k3(1.0)) / 2,
            "kl_behavior_s1": k3(6.0),
            "kl_behavior_s3": k3(8.0),
            "logprob_gap": math.log(2),
        }
    )


def test_ranks_add_up_also_one_that_has_nothing() -> None:
    staleness, fresh = [0, 0, 1, 3], [True, False, True, False]
    whole = measures(RATIO, staleness, fresh)
    parts = [measures(RATIO[part], staleness[part], fresh[part]) for part in (slice(0, 3), slice(3, 4), slice(0, 0))]
    assert found_from(*parts)["kl_behavior"] == pytest.approx(found_from(whole)["kl_behavior"])
    assert found_from(*parts)["effective_sample_size"] == pytest.approx(found_from(whole)["effective_sample_size"])


def test_on_policy_metrics_say_on_policy() -> None:
    found = found_from(measures(torch.ones(4, dtype=torch.float64), [0] * 4, [True] * 4))
    assert found["effective_sample_size"] == found["ratio_mean"] == found["ratio_max"] == 1.0
    assert found["kl_behavior"] == found["logprob_gap"] == 0.0


def test_without_a_completion_of_this_very_version_there_is_no_gap_to_report() -> None:
    assert "logprob_gap" not in found_from(measures(RATIO, [0, 1, 1, 1], [False] * 4))


def test_conversations_are_described_by_their_turns_and_other_answers_are_not() -> None:
    plain = completion([1, 2, 3])
    talk = replace(plain, tokens=tokens_to_bytes([1, 7, 7, 2, 7, 3]), given=(Given(1, 2), Given(4, 1)))
    found = describe_groups([rollout_group([5], [(talk, 1.0), (plain, 0.0)])])
    assert (found["turns"], found["given_tokens"], found["answer_tokens"]) == (2.0, 1.5, 3.0)
    assert "turns" not in describe_groups([rollout_group([5], [(plain, 1.0), (plain, 0.0)])])


def test_how_sure_the_policy_was_is_known_where_nothing_is_trained() -> None:
    sure, not_sure = completion([1, 2, 3], [0.0, -0.25, -0.5]), completion([4], [-3.25])
    found = describe_groups([rollout_group([5], [(sure, 1.0), (not_sure, 1.0)])])
    assert found["sampled_logprob"] == -1.0, "of all tokens, not of answers"


def test_groups_without_variance_are_those_without_advantages() -> None:
    """As the trainer sees them: after the penalty for answers that were cut off, and without rows of data."""
    plain, cut = completion([1, 2, 3]), replace(completion([1, 2]), truncated=True)
    group, alone = rollout_group([5], [(plain, 1.0), (cut, 1.0)]), rollout_group([5], [(plain, 1.0)])
    row = replace(alone, prompt=replace(alone.prompt, written=b"x"))
    assert describe_groups([group, alone])["zero_variance_share"] == 0.5
    assert describe_groups([group, alone], cut_off_penalty=0.5)["zero_variance_share"] == 0.0
    found = describe_groups([group, row, row])
    assert (found["zero_variance_share"], found["groups"], found["sft_rows"]) == (1.0, 3.0, 2.0)
