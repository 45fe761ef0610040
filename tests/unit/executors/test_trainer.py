"""The trainer makes one step per batch, never with a number that is none, and divides by the tokens of the update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.groups import completion, rollout_group
from helpers.models import lively_model
from torch import Tensor

from llamarl.algo.batch import TokenBatch, make_batch
from llamarl.algo.losses import Loss, aipo_loss
from llamarl.config import Algo
from llamarl.config import Trainer as TrainerConfig
from llamarl.executors.trainer import Trainer, learning_rate, make_optimizer, policy_logprobs
from llamarl.messages import BatchResult, WorkOnBatch
from llamarl.types import RolloutGroup
from llamarl.weights.transport import Publication


class NoWeights:
    def publish(self, version: int) -> Publication:
        raise AssertionError("nobody asked for it")


def make_trainer(loss: Loss = aipo_loss, settings: TrainerConfig | None = None, algo: Algo | None = None) -> Trainer:
    return Trainer(
        lively_model(),
        NoWeights(),
        loss,
        settings=settings or TrainerConfig(lr=1e-3, warmup_updates=0, max_grad_norm=1e9),
        algo=algo or Algo(),
        temperature=1.0,
        updates=10,
        carry_from=Path("."),
    )


def group(*rewards: float) -> RolloutGroup:
    return rollout_group([3, 4], [(completion([5 + i, 6, 7]), reward) for i, reward in enumerate(rewards)])


def update(trainer: Trainer, *groups: RolloutGroup, number: int = 0) -> dict[str, float]:
    (report,) = trainer.handle(WorkOnBatch(number, groups))
    assert isinstance(report, BatchResult)
    return report.metrics


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_makes_good_completions_likelier_and_bad_ones_less_likely() -> None:
    trainer, batch = make_trainer(), make_batch([group(1.0, 0.0)], version=0)
    assert batch is not None
    before = policy_logprobs(trainer.model, batch, 1.0).detach()
    update(trainer, group(1.0, 0.0))
    change = policy_logprobs(trainer.model, batch, 1.0).detach() - before
    assert change[:3].sum() > 0 > change[3:].sum()


def bad_gradient(value: float) -> Loss:
    def loss(tokens: TokenBatch, algo: Algo) -> tuple[Tensor, dict[str, float]]:
        return (tokens.policy_logprobs_N * value).sum(), {}

    return loss


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_no_number_never_reaches_the_weights(value: float) -> None:
    trainer = make_trainer(bad_gradient(value))
    before = weights_of(trainer)
    metrics = update(trainer, group(1.0, 0.0))
    assert metrics["skipped"] == 1.0
    assert same(weights_of(trainer), before)


def test_a_batch_without_anything_to_learn_leaves_the_weights_and_is_reported() -> None:
    for trainer, groups in [
        (make_trainer(), ()),
        (make_trainer(algo=Algo(zero_variance="skip")), (group(1.0, 1.0), group(0.0, 0.0))),
    ]:
        before = weights_of(trainer)
        assert update(trainer, *groups)["trained_tokens"] == 0.0
        assert same(weights_of(trainer), before)


def test_the_gradient_is_scaled_down_to_the_norm_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(settings=TrainerConfig(lr=1e-3, warmup_updates=0, max_grad_norm=0.01))
    norms: list[float] = []

    def step(closure: Callable[[], float] | None = None) -> None:
        grads = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))))

    monkeypatch.setattr(trainer.optimizer, "step", step)
    metrics = update(trainer, group(1.0, 0.0))
    assert metrics["grad_norm"] > 0.01, "the norm before scaling is what is reported"
    assert norms == pytest.approx([0.01], rel=1e-3)


def test_the_metrics_of_an_update_by_hand() -> None:
    metrics = update(make_trainer(algo=Algo(zero_variance="keep")), group(1.0, 0.0), group(1.0, 1.0))
    expected = {"groups": 2.0, "completions": 4.0, "reward": 0.75, "zero_variance_share": 0.5, "answer_tokens": 3.0}
    assert {name: metrics[name] for name in expected} == expected
    assert (metrics["trained_tokens"], metrics["staleness_max"], metrics["skipped"]) == (12.0, 0.0, 0.0)


def test_the_learning_rate_warms_up_and_falls() -> None:
    settings = TrainerConfig(lr=1.0, warmup_updates=4, final_lr_share=0.2)
    assert [learning_rate(settings, update, 12) for update in range(4)] == [0.25, 0.5, 0.75, 1.0]
    falling = [learning_rate(settings, update, 12) for update in range(4, 13)]
    assert falling[0] == 1.0
    assert falling[-1] == pytest.approx(0.2)
    assert falling == sorted(falling, reverse=True)
    constant = TrainerConfig(lr=1.0, warmup_updates=0, final_lr_share=1.0)
    assert {learning_rate(constant, update, 12) for update in range(12)} == {1.0}


def test_decay_pulls_on_matrices_only() -> None:
    model = lively_model()
    matrices, vectors = make_optimizer(model, TrainerConfig(weight_decay=0.5)).param_groups
    assert matrices["weight_decay"] == 0.5
    assert vectors["weight_decay"] == 0.0
    assert all(parameter.dim() > 1 for parameter in matrices["params"])
    assert all(parameter.dim() == 1 for parameter in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))
