"""A critic's values, gradients and advantages against the same computed plainly, one answer at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.groups import completion, rollout_group
from helpers.models import SHAPE, lively_model
from helpers.training import CPU, assert_same_gradients
from msgspec.structs import replace as with_fields
from torch import Tensor

from llamarl.algo.advantages import TOKEN_ADVANTAGES
from llamarl.algo.batch import VALUE, Document, make_documents
from llamarl.algo.gae import RETURNS, VALUES, gae
from llamarl.algo.losses import ppo_loss
from llamarl.algo.streams import StreamWeights
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.errors import OwnCodeFailed
from llamarl.model.checkpoint import load_model, random_model, save_model
from llamarl.model.classifier import load_classifier, open_value_model
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.train.critic import Critic, OutOfOrder
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, Policy, load_value_policy
from llamarl.types import Given, RolloutGroup, bytes_to_floats

GAE = AlgoConfig(advantage="gae", loss="ppo", gamma=0.99, gae_lambda=0.9, whiten=False)
VALUE_SHAPE = with_fields(SHAPE, value_head=True)


def learner_of(model: Transformer, *, lr: float = 1e-3, **settings: object) -> Learner:
    how = ComputeSettings(CPU, torch.float32, tokens_per_pack=60)
    trainer = TrainerConfig(lr=lr, warmup_updates=0)
    return Learner(Policy(model, how), ppo_loss, settings=trainer, algo=GAE, updates=100, **settings)  # type: ignore[arg-type]


def critic_of(model: Transformer, algo: AlgoConfig = GAE, *, lr: float = 1e-3, **settings: object) -> Critic:
    return Critic(learner_of(model, lr=lr, **settings), algo, target_lambda=1.0)


def batch(seed: int = 0) -> list[RolloutGroup]:
    """Groups of several answers, one of them with a tool's reply in the middle."""
    rng, groups = np.random.default_rng(seed), []
    for ordinal in range(4):
        answers = []
        for _ in range(3):
            tokens = rng.integers(1, 23, int(rng.integers(4, 9))).tolist()
            answers.append((completion(tokens), float(rng.integers(0, 2))))
        groups.append(rollout_group(rng.integers(1, 23, 4).tolist(), answers, ordinal=ordinal))
    spoken = groups[0].rollouts[0].completion
    kept = spoken.num_tokens - 2
    talked = with_fields(
        completion([1] * kept), tokens=spoken.tokens, given=(Given(start=1, count=2),)
    )  # tokens 1 and 2 are a tool's
    first = with_fields(groups[0].rollouts[0], completion=talked)
    groups[0] = RolloutGroup(groups[0].prompt, (first, *groups[0].rollouts[1:]))
    return groups


def plain_values(model: Transformer, document: Document) -> Tensor:
    """The value before every sampled token, without packs."""
    tokens_1T = torch.from_numpy(document.tokens.astype(np.int64))[None]
    hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], causal_attention)
    values: Tensor = (hidden_1TC[0, document.places - 1] @ model.lm_head.weight.T)[:, 0]
    return values


def test_values_and_advantages_are_those_of_each_answer_alone() -> None:
    groups = batch()
    found = critic_of(lively_model(shape=VALUE_SHAPE)).work_on(0, groups)
    trained = make_documents(found.groups, version=0, algo=GAE)
    for document, group in zip(trained, [one for one in found.groups for _ in one.rollouts], strict=True):
        reward = group.rollouts[document.source[1]].reward
        values = plain_values(lively_model(shape=VALUE_SHAPE), document).detach().numpy()
        np.testing.assert_allclose(document.columns[VALUES], values, atol=1e-4)
        np.testing.assert_allclose(document.advantages, gae(values, reward, gamma=0.99, decay=0.9), atol=1e-4)
    assert trained[0].given
    assert len(trained[0].advantages) == len(trained[0].tokens) - trained[0].num_prompt_tokens - 2, "no tool's tokens"


def test_the_policy_learns_from_advantages_that_are_whitened_over_the_batch() -> None:
    plain, white = (
        critic_of(lively_model(shape=VALUE_SHAPE), with_fields(GAE, whiten=whiten)).work_on(0, batch())
        for whiten in (False, True)
    )
    raw, found = (
        np.concatenate([one.advantages for one in make_documents(valued.groups, version=0, algo=GAE)])
        for valued in (plain, white)
    )
    np.testing.assert_allclose([found.mean(), found.std()], [0.0, 1.0], atol=1e-5)
    np.testing.assert_allclose(found, (raw - raw.mean()) / raw.std(), atol=1e-4)
    assert white.metrics["advantage_std"] == plain.metrics["advantage_std"], "told as they were before"


def test_its_gradients_are_those_of_the_clipped_error_of_each_answer_alone() -> None:
    model, groups = lively_model(shape=VALUE_SHAPE), batch()
    critic = critic_of(lively_model(shape=VALUE_SHAPE), weights=StreamWeights(value_clip=0.2), lr=1e-9)
    documents = make_documents(critic.work_on(0, groups).groups, version=0, algo=GAE)
    rng = np.random.default_rng(1)
    lessons = [
        replace(
            one,
            streams=VALUE,
            columns={
                VALUES: rng.normal(0, 3, one.num_answer_tokens).astype(np.float32),
                RETURNS: rng.normal(0, 3, one.num_answer_tokens).astype(np.float32),
            },
        )
        for one in documents
    ]
    total = torch.zeros(())
    for one in lessons:
        value, before, target = plain_values(model, one), *(torch.from_numpy(one.columns[n]) for n in (VALUES, RETURNS))
        bounded = torch.minimum(torch.maximum(value, before - 0.2), before + 0.2)
        total = total + 0.5 * torch.maximum((value - target) ** 2, (bounded - target) ** 2).sum()
    total = total / sum(one.num_answer_tokens for one in lessons)
    total.backward()  # type: ignore[no-untyped-call]
    seen = critic.learner.accumulate(lessons)
    assert seen.loss() == pytest.approx(total.item(), rel=1e-5)
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert_same_gradients(critic.learner.optimizer.gradients(), expected)


def judged(seed: int) -> list[RolloutGroup]:
    """Answers whose first token decides the reward, so that it explains all variance behind it."""
    groups = batch(seed)
    rollouts = [
        tuple(with_fields(one, reward=float(one.completion.tokens[0] < 12)) for one in group.rollouts)
        for group in groups
    ]
    return [RolloutGroup(group.prompt, of_group) for group, of_group in zip(groups, rollouts, strict=True)]


def explained(critic: Critic, updates: int = 12) -> tuple[float, float]:
    """The variance that it explains of the same answers, at first and at last."""
    found = [critic.work_on(update, judged(0)).metrics["explained_variance"] for update in range(updates)]
    return found[0], found[-1]


def test_it_learns_and_explained_variance_notices_if_it_does_not() -> None:
    first, last = explained(critic_of(random_model(VALUE_SHAPE, seed=3), lr=1e-2))
    assert first < 0.1 and last > 0.4, (first, last)
    _, never = explained(critic_of(random_model(VALUE_SHAPE, seed=3), lr=1e-12))
    assert never < 0.1, never


def test_a_batch_that_is_not_the_next_one_is_refused() -> None:
    critic = critic_of(lively_model(shape=VALUE_SHAPE))
    critic.work_on(0, batch())
    with pytest.raises(OutOfOrder, match="it is at update 1, but was given the batch of update 0"):
        critic.work_on(0, batch())


def test_the_policy_does_not_learn_from_answers_that_no_critic_has_seen() -> None:
    groups = batch()
    with pytest.raises(OwnCodeFailed, match="group 0: no critic has given it advantages"):
        make_documents(groups, version=0, algo=GAE)
    valued = critic_of(lively_model(shape=VALUE_SHAPE)).work_on(0, groups).groups
    assert all(TOKEN_ADVANTAGES in one.columns for group in valued for one in group.rollouts)
    assert len(make_documents(valued, version=0, algo=GAE)) == 12, "also of groups whose rewards are all equal"


def test_it_begins_from_a_policy_at_zero_or_from_a_classifier(tmp_path: Path) -> None:
    for tied in (True, False):
        spoken = lively_model(shape=with_fields(SHAPE, tied_head=tied))
        save_model(spoken, tmp_path / f"policy{tied}")
        begun = load_value_policy(tmp_path / f"policy{tied}", ComputeSettings(CPU, torch.float32)).model
        assert begun.lm_head.weight.shape == (1, 32) and not begun.lm_head.weight.any()
        for name, parameter in spoken.named_parameters():
            if name != "lm_head.weight":
                assert torch.equal(dict(begun.named_parameters())[name], parameter), name
    scored = lively_model(shape=VALUE_SHAPE)
    save_model(scored, tmp_path / "critic", carry_from=tmp_path / "policyFalse")
    assert open_value_model(tmp_path / "critic").shape == VALUE_SHAPE
    again = load_value_policy(tmp_path / "critic", ComputeSettings(CPU, torch.float32)).model
    assert torch.equal(again.lm_head.weight, scored.lm_head.weight)
    scores = load_classifier(tmp_path / "critic", dtype=torch.float32, device=CPU).scores([[3, 5, 7]])
    hidden = scored(torch.tensor([[3, 5, 7]]), torch.arange(3)[None], causal_attention)
    assert scores == pytest.approx([(hidden[0, 2] @ scored.lm_head.weight[0]).item()], rel=1e-4)
    with pytest.raises(Exception, match=r"score\.weight|architectures"):
        load_model(tmp_path / "critic")


def test_the_first_value_of_an_answer_reads_its_prompt_only() -> None:
    """Values that are shifted by a token would have read the token that they are to judge."""
    critic = critic_of(lively_model(shape=VALUE_SHAPE))
    answers = [(completion([token, 5, 6]), 1.0) for token in (1, 9, 17)]
    groups = [rollout_group([4, 8, 2], answers)]
    found = [bytes_to_floats(one.columns[VALUES]) for one in critic.work_on(0, groups).groups[0].rollouts]
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5) and found[0][0] == pytest.approx(found[2][0], abs=1e-5)
    assert len({round(float(one[1]), 3) for one in found}) == 3
