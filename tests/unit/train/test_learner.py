"""However an update is cut up, packed or computed, its loss and gradients are those of one document at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.groups import completion, prompt_group, rollout_group
from helpers.models import SHAPE, lively_model
from helpers.training import assert_same_gradients, cpu_learner, make_test_documents, naive_gradients
from msgspec.structs import replace as replace_field
from torch import Tensor

from llamarl.algo.batch import TokenBatch, document_of
from llamarl.algo.losses import LOSSES, REFERENCE_LOGPROBS, Loss, tokenwise
from llamarl.config import AlgoConfig
from llamarl.train.learner import Learner
from llamarl.types import CompletionGroup

TIED = replace_field(SHAPE, tied_head=True)
QWEN = replace_field(SHAPE, qk_norm=True, qkv_bias=True)
DOCUMENTS = make_test_documents(20)


@pytest.mark.parametrize("shape", [SHAPE, TIED, QWEN], ids=["llama", "tied", "qwen"])
@pytest.mark.parametrize("tokens_per_pack", [16_384, 100, 16])
def test_packed_equals_one_by_one(shape: object, tokens_per_pack: int) -> None:
    """One pass, a few, or one for nearly every document: accumulation changes nothing but rounding."""
    learner = cpu_learner(lively_model(shape=shape), tokens_per_pack=tokens_per_pack)  # type: ignore[arg-type]
    seen = learner.accumulate(DOCUMENTS)
    loss, expected = naive_gradients(lively_model(shape=shape), DOCUMENTS)  # type: ignore[arg-type]
    assert seen.loss() == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(learner.optimizer.gradients(), expected)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_bits(recompute: str) -> None:
    plain, thrifty = cpu_learner(), cpu_learner(recompute=recompute)
    assert thrifty.accumulate(DOCUMENTS).loss() == plain.accumulate(DOCUMENTS).loss()
    for name, grad in plain.optimizer.gradients().items():
        assert torch.equal(thrifty.optimizer.gradients()[name], grad)


WITH_REFERENCE = [replace(document, columns={REFERENCE_LOGPROBS: document.behavior_logprobs}) for document in DOCUMENTS]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_through_the_packed_chunked_model_equals_the_plain_way(name: str) -> None:
    algo = AlgoConfig(loss=name, entropy=0.05, reference_kl=0.1, gspo_low=0.5, gspo_high=0.5)
    learner = cpu_learner(loss=LOSSES[name], algo=algo, tokens_per_pack=100)
    seen = learner.accumulate(WITH_REFERENCE)
    loss, expected = naive_gradients(lively_model(), WITH_REFERENCE, LOSSES[name], algo)
    assert seen.loss() == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(learner.optimizer.gradients(), expected, tolerance=2e-5)


def test_a_loss_is_cut_inside_answers_only_if_it_says_that_it_may_be() -> None:
    counts: list[list[int]] = [[], []]

    def counting(calls: list[int]) -> Loss:
        def loss(tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor | float]]:
            calls.append(len(tokens.policy_logprobs_N))
            return tokens.policy_logprobs_N.sum() / tokens.num_tokens, {}

        return loss

    for loss in (counting(counts[0]), tokenwise(counting(counts[1]))):
        learner = cpu_learner(loss=loss)
        learner.policy.head = replace(learner.policy.head, chunk=50)
        learner.accumulate(DOCUMENTS)
    total = sum(document.num_answer_tokens for document in DOCUMENTS)
    assert counts[0] == [total]
    assert counts[1] == [min(50, total - start) for start in range(0, total, 50)]


def updates(learner: Learner) -> list[tuple[float, ...]]:
    found = []
    for number in range(4):
        seen = learner.accumulate(make_test_documents(20, seed=number))
        metrics = seen.metrics(make_test_documents(20, seed=number), 4.0)
        found.append((*metrics.values(), *learner.step(number, seen.loss()).values()))
    return found


def test_two_runs_with_the_same_seed_are_bit_identical() -> None:
    one, other = cpu_learner(tokens_per_pack=100), cpu_learner(tokens_per_pack=100)
    assert updates(one) == updates(other)
    for (name, mine), (_, theirs) in zip(one.optimizer.masters(), other.optimizer.masters(), strict=True):
        assert torch.equal(mine, theirs), name


def on_policy(learner: Learner, tokens: list[int], shift: float) -> list[float]:
    """What the learner's own policy makes of an answer, moved by `shift`."""
    document = document_of(prompt_group([3, 4]), completion(tokens), version=0)
    (pack,) = learner.policy.packs([document])
    return (learner.policy.logprobs(pack) + shift).tolist()


def test_the_gap_is_measured_on_the_probe_and_nothing_is_learnt_from_it() -> None:
    learner = cpu_learner()
    shifted = [([5, 6], 0.25), ([7], -1.0)]
    answers = [completion(tokens, on_policy(learner, tokens, shift)) for tokens, shift in shifted]
    before = {name: master.clone() for name, master in learner.optimizer.masters()}
    outcome = learner.update(0, (), CompletionGroup(prompt_group([3, 4]), tuple(answers)))
    assert outcome.metrics["logprob_gap"] == pytest.approx((0.25 + 0.25 + 1.0) / 3, abs=1e-5)
    assert outcome.metrics["trained_tokens"] == 0.0
    assert all(torch.equal(master, before[name]) for name, master in learner.optimizer.masters())


def test_without_a_probe_the_gap_is_measured_on_what_this_very_version_sampled() -> None:
    learner = cpu_learner()
    answers = [
        (completion([5, 6], on_policy(learner, [5, 6], 0.5), versions=[3, 3]), 1.0),
        (completion([7, 8], on_policy(learner, [7, 8], 9.0), versions=[2, 3]), 0.0),
    ]
    outcome = learner.update(3, [rollout_group([3, 4], answers)])
    assert outcome.metrics["logprob_gap"] == pytest.approx(0.5, abs=1e-5)
    assert outcome.metrics["staleness_share_1"] == 0.25
    stale = learner.update(4, [rollout_group([3, 4], answers)])
    assert "logprob_gap" not in stale.metrics


def test_an_update_is_described_whole() -> None:
    answers = [(completion([5, 6, 7]), 1.0), (completion([8]), 0.0)]
    outcome = cpu_learner().update(1, [rollout_group([3, 4], answers)])
    assert {
        *("groups", "completions", "reward", "zero_variance_share", "answer_tokens", "truncated_share", "loss"),
        *("grad_norm", "lr", "skipped", "trained_tokens", "ratio_mean", "ratio_max", "effective_sample_size"),
        *("entropy", "kl_behavior", "kl_behavior_s1", "staleness_mean", "staleness_max", "staleness_share_1"),
        *("clipped_share", "sampled_logprob"),
    } == set(outcome.metrics)
    assert {"compute_s", "tokens_per_s", "tflops_per_rank", "mfu_measured"} <= set(outcome.timings)
