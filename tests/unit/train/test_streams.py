"""An update with several streams is the sum of its terms, each divided by its own number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.groups import completion, prompt_group, rollout_group
from helpers.models import lively_model
from helpers.training import CPU, assert_same_gradients, cpu_learner, make_test_documents, one_by_one
from msgspec.structs import replace as replace_field
from torch import Tensor

from llamarl.algo.batch import IMITATION, POLICY, Document, Streams, make_documents
from llamarl.algo.losses import LOSSES, aipo_loss, gspo_loss
from llamarl.algo.streams import TEACHER_LOGPROBS, StreamCounts, StreamWeights
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.errors import OwnCodeFailed
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, Policy
from llamarl.train.teacher import HostedTeacher, Teachers
from llamarl.types import Given, RolloutGroup, WrittenAnswer, tokens_to_bytes, unjudged, written_group

GSPO = AlgoConfig(gspo_low=0.5, gspo_high=0.5)


def teacher_model(seed: int) -> Transformer:
    return lively_model(seed=seed)


def learner_with(teachers: Sequence[str], tokens_per_pack: int = 100, **settings: object) -> Learner:
    """A learner whose teachers are models of other seeds, by name."""
    how = ComputeSettings(CPU, torch.float32)
    found = {
        name: HostedTeacher(Policy(teacher_model(seed), how), offload=True) for seed, name in enumerate(teachers, 5)
    }
    plain = cpu_learner(tokens_per_pack=tokens_per_pack)
    return Learner(
        plain.policy,
        settings.pop("loss", aipo_loss),  # type: ignore[arg-type]
        settings=TrainerConfig(lr=1e-3),
        algo=settings.pop("algo", AlgoConfig()),  # type: ignore[arg-type]
        updates=10,
        teachers=Teachers(found, weight=0.6, forward=0.25) if found else None,
        weights=StreamWeights(imitation=0.5),
    )


def logprobs_of(model: Transformer, document: Document) -> Tensor:
    """Log-probs over the vocabulary at every sampled token, without packs or chunks."""
    tokens_1T = torch.from_numpy(document.tokens.astype(np.int64))[None]
    hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], causal_attention)
    return torch.log_softmax(model.logits(hidden_1TC[0, document.places - 1]), dim=-1)


def mean_cross_entropy(model: Transformer, documents: Sequence[Document]) -> Tensor:
    terms = []
    for one in documents:
        answer_n = torch.from_numpy(one.answer.astype(np.int64))
        terms.append(-logprobs_of(model, one).gather(1, answer_n[:, None])[:, 0])
    return torch.cat(terms).mean()


def kl_sum(model: Transformer, teacher: Transformer, document: Document, forward: float) -> Tensor:
    logp, logq = logprobs_of(model, document), logprobs_of(teacher, document).detach()
    reverse = (logp.exp() * (logp - logq)).sum()
    return (1 - forward) * reverse + forward * (logq.exp() * (logq - logp)).sum()


def in_streams(documents: Sequence[Document], kinds: Sequence[Streams]) -> list[Document]:
    return [replace(one, streams=kinds[number % len(kinds)]) for number, one in enumerate(documents)]


KINDS = [POLICY, IMITATION, Streams(teacher="a"), Streams(policy=False, teacher="b")]
MIXED = in_streams(make_test_documents(20), KINDS)


@pytest.mark.parametrize("loss", [aipo_loss, gspo_loss])
@pytest.mark.parametrize("tokens_per_pack", [16_384, 60])
def test_streams_add_up_each_divided_by_its_own_tokens(tokens_per_pack: int, loss: object) -> None:
    learner = learner_with(["a", "b"], tokens_per_pack, loss=loss, algo=GSPO)
    seen = learner.accumulate(MIXED)
    model, teachers = lively_model(), {"a": teacher_model(5), "b": teacher_model(6)}
    policy = one_by_one(model, [one for one in MIXED if one.streams.policy], loss, GSPO)  # type: ignore[arg-type]
    imitation = mean_cross_entropy(model, [one for one in MIXED if one.streams.imitation])
    taught = [one for one in MIXED if one.streams.teacher]
    sums = [kl_sum(model, teachers[one.streams.teacher], one, 0.25) for one in taught]
    kl = torch.stack(sums).sum() / sum(one.num_answer_tokens for one in taught)
    expected = policy + 0.5 * imitation + 0.6 * kl
    expected.backward()  # type: ignore[no-untyped-call]
    wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert seen.loss() == pytest.approx(expected.item(), abs=1e-5)
    assert_same_gradients(learner.optimizer.gradients(), wanted, tolerance=2e-5)
    metrics = seen.metrics(MIXED, 4.0)
    assert metrics["sft_loss"] == pytest.approx(imitation.item(), abs=1e-5)
    assert metrics["teacher_kl"] == pytest.approx(kl.item(), abs=1e-5)
    assert metrics["trained_tokens"] == sum(one.num_answer_tokens for one in MIXED)


def test_a_policy_stream_alone_is_what_it_was_to_the_bit() -> None:
    documents = make_test_documents(20)
    plain, other = cpu_learner(tokens_per_pack=100), learner_with(["a"])
    assert plain.accumulate(documents).loss() == other.accumulate(documents).loss()
    for name, grad in plain.optimizer.gradients().items():
        assert torch.equal(other.optimizer.gradients()[name], grad)


def test_data_is_imitated_at_temperature_1_whatever_the_sampling() -> None:
    documents = in_streams(make_test_documents(6), [IMITATION])
    warm, plain = cpu_learner(temperature=0.5), cpu_learner()
    assert warm.accumulate(documents).loss() == plain.accumulate(documents).loss()


@pytest.mark.parametrize("name", [*LOSSES])
def test_a_sampled_kl_is_an_advantage(name: str) -> None:
    """log q - log p of each token is added to its advantage, whatever the loss."""
    rng = np.random.default_rng(0)
    documents = [
        replace(one, columns={TEACHER_LOGPROBS: rng.normal(-2, 1, one.num_answer_tokens).astype(np.float32)})
        for one in in_streams(make_test_documents(10), [Streams(teacher="a")])
    ]
    model, algo = lively_model(), replace_field(GSPO, loss=name)
    by_hand = []
    for one in documents:
        answer_n = torch.from_numpy(one.answer.astype(np.int64))
        own = logprobs_of(model, one).gather(1, answer_n[:, None])[:, 0].detach().numpy()
        by_hand.append(replace(one, advantages=one.advantages + 0.3 * (one.columns[TEACHER_LOGPROBS] - own)))
    expected = one_by_one(model, by_hand, LOSSES[name], algo)
    expected.backward()  # type: ignore[no-untyped-call]
    wanted = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    plain = cpu_learner(loss=LOSSES[name], algo=algo, tokens_per_pack=60)
    learner = Learner(
        plain.policy,
        LOSSES[name],
        settings=TrainerConfig(),
        algo=algo,
        updates=10,
        weights=StreamWeights(sampled_kl=0.3),
    )
    assert learner.accumulate(documents).loss() == pytest.approx(expected.item(), abs=2e-5)
    assert_same_gradients(learner.optimizer.gradients(), wanted, tolerance=2e-5)


# Which streams a group is in


def taught(rewards: Sequence[float], teacher: str = "a") -> RolloutGroup:
    group = rollout_group([3, 4], [(completion([5, 6]), reward) for reward in rewards])
    return replace_field(group, prompt=replace_field(group.prompt, teacher=teacher))


def row() -> RolloutGroup:
    written = WrittenAnswer(tokens_to_bytes([5, 6, 7, 2]))
    return unjudged(written_group(replace_field(prompt_group([3, 4]), written=written), 3))


def streams_of(group: RolloutGroup, sampled_kl: float = 0.0, **algo: object) -> list[Streams]:
    settings = AlgoConfig(**algo)  # type: ignore[arg-type]
    return [one.streams for one in make_documents([group], version=3, algo=settings, sampled_kl=sampled_kl)]


def test_a_group_without_variance_still_learns_from_its_teacher_but_not_from_its_reward() -> None:
    assert streams_of(taught([1.0, 0.0])) == [Streams(teacher="a")] * 2
    assert streams_of(taught([1.0, 1.0])) == [Streams(policy=False, teacher="a")] * 2
    assert streams_of(taught([1.0, 1.0], teacher="")) == []
    assert streams_of(taught([1.0, 1.0]), sampled_kl=1.0) == [Streams(teacher="a")] * 2


def test_without_a_weight_of_rewards_only_the_teacher_is_left() -> None:
    assert streams_of(taught([1.0, 0.0]), reward_weight=0.0) == [Streams(policy=False, teacher="a")] * 2
    (first, _) = make_documents([taught([1.0, 0.0])], version=3, algo=AlgoConfig(reward_weight=0.5))
    assert first.advantages.tolist() == [0.25, 0.25]


def test_rows_of_data_are_imitated_whatever_their_reward() -> None:
    assert streams_of(row()) == [IMITATION]
    assert StreamCounts.of(make_documents([row()], version=3, algo=AlgoConfig())).imitation == 4


def test_a_users_later_turns_in_a_row_are_not_learned() -> None:
    written = WrittenAnswer(tokens_to_bytes([5, 6, 7, 2]), (Given(1, 2),))
    group = unjudged(written_group(replace_field(prompt_group([3, 4]), written=written), 3))
    (document,) = make_documents([group], version=3, algo=AlgoConfig())
    assert document.answer.tolist() == [5, 2] and document.places.tolist() == [2, 5]


def test_an_answer_that_is_not_the_datas_is_never_imitated() -> None:
    changed = replace_field(row(), rollouts=taught([1.0]).rollouts)
    with pytest.raises(OwnCodeFailed, match="not the one that the data gives"):
        make_documents([changed], version=3, algo=AlgoConfig())


@pytest.mark.parametrize("teachers", [[], ["b"]])
def test_a_teacher_that_is_not_there_is_not_passed_over(teachers: list[str]) -> None:
    documents = in_streams(make_test_documents(4), [Streams(teacher="a")])
    with pytest.raises(LookupError, match="no teacher is named 'a'"):
        learner_with(teachers).accumulate(documents)


def test_an_update_of_rows_alone_reports_what_it_learned() -> None:
    outcome = cpu_learner().update(3, [row(), row()])
    assert {"sft_rows", "sft_tokens", "sft_loss", "loss", "grad_norm", "trained_tokens"} <= outcome.metrics.keys()
    assert outcome.metrics["sft_loss"] == pytest.approx(outcome.metrics["loss"], abs=1e-6)
    assert outcome.metrics["sft_rows"] == 2.0 and "reward" not in outcome.metrics


def test_rows_beside_rollouts_leave_the_metrics_of_rollouts_alone() -> None:
    rollouts = taught([1.0, 0.0], teacher="")
    mixed, plain = cpu_learner().update(3, [rollouts, row()]).metrics, cpu_learner().update(3, [rollouts]).metrics
    own = {"loss", "grad_norm", "trained_tokens", "groups"}
    assert {name: mixed[name] for name in plain.keys() - own} == {name: plain[name] for name in plain.keys() - own}


def test_a_teacher_gives_its_log_probs_of_sampled_tokens_as_a_column() -> None:
    how = ComputeSettings(CPU, torch.float32)
    teachers = Teachers({"a": HostedTeacher(Policy(teacher_model(5), how), offload=False)})
    untaught = rollout_group([3, 4], [(completion([5, 6]), 1.0)], ordinal=1)
    first, other = teachers.add_column([taught([1.0, 0.0]), untaught])
    (document,) = make_documents([first], version=3, algo=AlgoConfig(), sampled_kl=1.0)[:1]
    expected = logprobs_of(teacher_model(5), document).gather(1, torch.tensor([[5], [6]]))[:, 0]
    assert torch.allclose(torch.tensor(document.columns[TEACHER_LOGPROBS]), expected, atol=1e-5)
    assert TEACHER_LOGPROBS not in other.rollouts[0].columns
