"""Several optimizer steps from one batch: every document in each pass once, and one step is what it always was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.training import cpu_learner, make_test_documents

from llamarl.algo.losses import ppo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.train.learner import Learner
from llamarl.train.passes import UpdatePasses, merge_steps


def learner_with(passes: UpdatePasses | None) -> Learner:
    algo, policy = AlgoConfig(loss="ppo"), cpu_learner(tokens_per_pack=60).policy
    return Learner(policy, ppo_loss, settings=TrainerConfig(lr=1e-3), algo=algo, updates=10, passes=passes)


@pytest.mark.parametrize(("epochs", "minibatches", "documents"), [(1, 1, 5), (3, 1, 5), (2, 4, 10), (2, 8, 3)])
def test_each_pass_has_every_document_once(epochs: int, minibatches: int, documents: int) -> None:
    found = list(UpdatePasses(epochs, minibatches, seed=1).parts(7, documents))
    assert found == list(UpdatePasses(epochs, minibatches, seed=1).parts(7, documents)), "the seed decides"
    assert len(found) == epochs
    for parts in found:
        assert len(parts) == min(minibatches, documents)
        if minibatches > 1:
            assert sorted(number for part in parts for number in part or ()) == list(range(documents))
    if minibatches > 1 and documents > 4:
        assert found[0] != found[1], "parts are dealt anew for each pass"


def test_steps_of_a_part_are_those_of_an_update_with_these_documents_alone() -> None:
    documents = make_test_documents(9)
    found, plain = learner_with(UpdatePasses(2, 3, seed=4)), learner_with(None)
    learned = found.learn(0, documents)
    for parts in UpdatePasses(2, 3, seed=4).parts(0, 9):
        for part in parts:
            assert part is not None
            plain.learn(0, [documents[number] for number in part])
    for (name, mine), (_, theirs) in zip(
        found.policy.model.named_parameters(), plain.policy.model.named_parameters(), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-6), name
    assert learned.steps["optimizer_steps"] == 6 and found.optimizer.num_steps == 6
    assert learned.metrics["trained_tokens"] == sum(one.num_answer_tokens for one in documents), (
        "each token counts once"
    )


def test_later_passes_are_further_from_the_policy_that_sampled() -> None:
    documents = make_test_documents(9)
    once, often = learner_with(None).learn(0, documents), learner_with(UpdatePasses(8, 1)).learn(0, documents)
    assert often.metrics["kl_behavior"] != once.metrics["kl_behavior"], "metrics are those of the last pass"
    assert "optimizer_steps" not in once.steps, "a job with one step has the metrics that it always had"


@pytest.mark.parametrize("passes", [UpdatePasses(1, 3), UpdatePasses(3, 1), UpdatePasses(2, 3)], ids=str)
def test_the_distance_from_the_generator_is_that_before_the_first_step(passes: UpdatePasses) -> None:
    """Later steps see weights that nobody has sampled with."""
    learner = learner_with(passes)
    documents = []
    for one in make_test_documents(9):
        fresh = replace(one, staleness=np.zeros_like(one.staleness))
        (pack,) = learner.policy.packs([fresh])
        documents.append(replace(fresh, behavior_logprobs=learner.policy.logprobs(pack).numpy()))
    assert learner.learn(0, documents).metrics["logprob_gap"] < 1e-5


def test_a_skipped_step_is_told() -> None:
    told = {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0}
    assert merge_steps([told]) == told
    assert merge_steps([told, {**told, "loss": 3.0, "skipped": 1.0}]) == {
        "loss": 2.0,
        "grad_norm": 2.0,
        "lr": 0.1,
        "skipped": 1.0,
        "optimizer_steps": 2.0,
    }
