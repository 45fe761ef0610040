"""The trainer makes one step per batch, never with a number that is none, and divides by the tokens of the update."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from helpers.groups import completion, rollout_group
from helpers.models import lively_model
from helpers.training import CPU
from torch import Tensor

from llamarl.algo.batch import TokenBatch, make_documents
from llamarl.algo.losses import Loss, aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.executors.trainer import Trainer
from llamarl.messages import (
    BatchResult,
    Failed,
    Noted,
    PublishWeights,
    Report,
    SaveState,
    StateSaved,
    WeightsPublished,
    WorkOnBatch,
)
from llamarl.model.checkpoint import load_model, save_model
from llamarl.model.training_state import POLICY
from llamarl.model.transformer import Transformer
from llamarl.train.learner import Learner, learning_rate
from llamarl.train.policy import ComputeSettings, Policy
from llamarl.train.reference import HostedReference
from llamarl.train.restore import restore
from llamarl.types import RolloutGroup
from llamarl.weights.transport import Publication


class NoWeights:
    def publish(self, version: int) -> Publication:
        raise AssertionError("nobody asked for it")


def make_trainer(
    loss: Loss = aipo_loss,
    settings: TrainerConfig | None = None,
    algo: AlgoConfig | None = None,
    reference: HostedReference | None = None,
    carry_from: Path = Path("."),
) -> Trainer:
    learner = Learner(
        Policy(lively_model(), ComputeSettings(CPU, torch.float32)),
        loss,
        settings=settings or TrainerConfig(lr=1e-3, warmup_updates=0, max_grad_norm=1e9),
        algo=algo or AlgoConfig(),
        updates=10,
    )
    return Trainer(learner, NoWeights(), carry_from=carry_from, reference=reference)


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
    trainer = make_trainer()
    policy = trainer.learner.policy
    (pack,) = policy.packs(make_documents([group(1.0, 0.0)], version=0, algo=AlgoConfig()))
    before = policy.logprobs(pack)
    update(trainer, group(1.0, 0.0))
    change = policy.logprobs(pack) - before
    assert change[pack.sequence_N == 0].sum() > 0 > change[pack.sequence_N == 1].sum()


def bad_gradient(value: float) -> Loss:
    def loss(tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor | float]]:
        return (tokens.policy_logprobs_N * value).sum(), {}

    return loss


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_no_number_never_reaches_the_weights(value: float) -> None:
    trainer = make_trainer(bad_gradient(value))
    before = weights_of(trainer)
    metrics = update(trainer, group(1.0, 0.0))
    assert metrics["skipped"] == 1.0
    assert same(weights_of(trainer), before)
    assert trainer.optimizer.num_steps == 0


def test_a_batch_without_anything_to_learn_leaves_the_weights_and_is_reported() -> None:
    for trainer, groups in [
        (make_trainer(), ()),
        (make_trainer(algo=AlgoConfig(zero_variance="skip")), (group(1.0, 1.0), group(0.0, 0.0))),
    ]:
        before = weights_of(trainer)
        assert update(trainer, *groups)["trained_tokens"] == 0.0
        assert same(weights_of(trainer), before)


def test_the_gradient_is_scaled_down_to_the_norm_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(settings=TrainerConfig(lr=1e-3, warmup_updates=0, max_grad_norm=0.01))
    norms: list[float] = []

    def step(lr: float, scale: Tensor, sound: Tensor) -> bool:
        grads = trainer.optimizer.gradients().values()
        norms.append(float(torch.linalg.vector_norm(torch.cat([(grad * scale).flatten() for grad in grads]))))
        return bool(sound)

    monkeypatch.setattr(trainer.optimizer, "step", step)
    metrics = update(trainer, group(1.0, 0.0))
    assert metrics["grad_norm"] > 0.01, "the norm before scaling is what is reported"
    assert norms == pytest.approx([0.01], rel=1e-3)


def test_the_metrics_of_an_update_by_hand() -> None:
    metrics = update(make_trainer(algo=AlgoConfig(zero_variance="keep")), group(1.0, 0.0), group(1.0, 1.0))
    expected = {"groups": 2.0, "completions": 4.0, "reward": 0.75, "zero_variance_share": 0.5, "answer_tokens": 3.0}
    assert {name: metrics[name] for name in expected} == expected
    assert (metrics["trained_tokens"], metrics["staleness_max"], metrics["skipped"]) == (12.0, 0.0, 0.0)


def test_wall_times_are_reported_apart_from_what_a_seed_determines() -> None:
    (report,) = make_trainer().handle(WorkOnBatch(0, (group(1.0, 0.0),)))
    assert isinstance(report, BatchResult)
    assert {"tokens_per_s", "mfu_measured"} <= report.timings.keys()
    assert not report.timings.keys() & report.metrics.keys()


def test_a_reference_on_the_trainers_ranks_holds_the_policy_back() -> None:
    """At the first update policy and reference are the same: no KL. Afterwards they differ."""
    reference = HostedReference(Policy(lively_model(), ComputeSettings(CPU, torch.float32)))
    trainer = make_trainer(algo=AlgoConfig(reference_kl=0.1), reference=reference)
    assert update(trainer, group(1.0, 0.0))["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert update(trainer, group(1.0, 0.0), number=1)["kl_reference"] > 1e-6


def save(trainer: Trainer, version: int, folder: Path) -> StateSaved:
    assert list(trainer.handle(SaveState(version, str(folder)))) == []
    reports = []
    while not trainer.idle:
        reports += list(trainer.work())
    (saved,) = reports
    assert isinstance(saved, StateSaved)
    return saved


def test_a_trainer_that_comes_back_from_its_snapshot_goes_on_as_if_it_had_never_been_away(tmp_path: Path) -> None:
    save_model(lively_model(), tmp_path / "model")
    trainer = make_trainer(carry_from=tmp_path / "model")
    update(trainer, group(1.0, 0.0))
    saved = save(trainer, 1, tmp_path / "snapshot")
    found = sorted(str(path.relative_to(tmp_path / "snapshot")) for path in (tmp_path / "snapshot").rglob("*.*"))
    assert sorted(saved.files) == found
    again = make_trainer(carry_from=tmp_path / "model")
    again.model.load_state_dict(load_model(tmp_path / "snapshot" / POLICY).state_dict())
    restore(again.model, again.optimizer, tmp_path / "snapshot")
    for one in (trainer, again):
        update(one, group(0.0, 1.0), number=1)
    assert same(weights_of(trainer), weights_of(again))


def test_the_learning_rate_warms_up_and_falls() -> None:
    settings = TrainerConfig(lr=1.0, warmup_updates=4, final_lr_share=0.2)
    assert [learning_rate(settings, update, 12) for update in range(4)] == [0.25, 0.5, 0.75, 1.0]
    falling = [learning_rate(settings, update, 12) for update in range(4, 13)]
    assert falling[0] == 1.0
    assert falling[-1] == pytest.approx(0.2)
    assert falling == sorted(falling, reverse=True)
    constant = TrainerConfig(lr=1.0, warmup_updates=0, final_lr_share=1.0)
    assert {learning_rate(constant, update, 12) for update in range(12)} == {1.0}


class SlowWeights:
    """A publication that takes until it is allowed to end, and notes what it read."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.go_on, self.read = model, threading.Event(), torch.zeros(0)

    def publish(self, version: int) -> Publication:
        assert self.go_on.wait(30)
        self.read = self.model.lm_head.weight.detach().clone()
        return Publication(version, "", 1)


def test_a_publication_beside_the_next_update_reads_the_weights_before_they_change() -> None:
    told: list[Report] = []
    base = make_trainer()
    weights = SlowWeights(base.model)
    trainer = Trainer(base.learner, weights, carry_from=Path("."), tell=told.append)
    before = base.model.lm_head.weight.detach().clone()
    assert list(trainer.handle(PublishWeights(3))) == []
    assert not told
    threading.Timer(0.2, weights.go_on.set).start()
    (report,) = trainer.handle(WorkOnBatch(0, (group(1.0, 0.0),)))
    assert isinstance(report, BatchResult)
    assert report.timings["sync_trainer_s"] > 0.05, "the step did not wait"
    assert told == [WeightsPublished(3, 1, True)]
    assert torch.equal(weights.read, before)
    assert not torch.equal(base.model.lm_head.weight, before)


def test_a_publication_that_fails_beside_the_update_is_told() -> None:
    told: list[Report] = []
    base = make_trainer()
    trainer = Trainer(base.learner, NoWeights(), carry_from=Path("."), tell=told.append)
    list(trainer.handle(PublishWeights(1)))
    with pytest.raises(AssertionError, match="nobody asked for it"):
        base.learner.hold()  # type: ignore[misc]
    assert told == [Failed("weights could not be published: AssertionError: nobody asked for it")]


class CountedWeights:
    def publish(self, version: int) -> Publication:
        return Publication(version, "checksum", 8)


def test_passes_are_compiled_between_messages_once_generators_have_weights() -> None:
    compiled: list[str] = []
    learner = make_trainer().learner
    trainer = Trainer(learner, CountedWeights(), carry_from=Path("."), warm_up=lambda: compiled.append("now"))
    states = [trainer.idle]
    list(trainer.handle(PublishWeights(0)))
    states.append(trainer.idle)
    assert states == [True, False], "generators wait for the first weights: nothing may come before them"
    (said,) = trainer.work()
    assert isinstance(said, Noted) and "compiling" in said.text
    assert trainer.preparing == "compile" and not compiled
    assert not list(trainer.work())
    assert compiled == ["now"]
    assert trainer.idle and not trainer.preparing


def test_nothing_is_compiled_ahead_once_a_batch_is_there() -> None:
    def never() -> None:
        raise AssertionError("the update compiles what it needs")

    trainer = Trainer(make_trainer().learner, CountedWeights(), carry_from=Path("."), warm_up=never)
    list(trainer.handle(PublishWeights(0)))
    update(trainer, group(1.0, 0.0))
    assert trainer.idle
