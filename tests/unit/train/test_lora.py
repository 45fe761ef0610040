"""Adapters in the trainer: the maths of the merged model, a base that never changes, and a start that is the base exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.experts import SHAPE as MIXTURE
from helpers.lora import LORA, merged_gradients, random_adapters, save_both
from helpers.models import SHAPE
from helpers.training import CPU, assert_same_gradients, make_test_documents
from torch import Tensor

from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, LoraConfig, TrainerConfig
from llamarl.errors import InputError
from llamarl.model.adapter_folder import load_merged
from llamarl.model_spec import ModelSpec
from llamarl.train import adapter_check
from llamarl.train.adapter_check import EffectGap, EffectTolerance, first_seen
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, Policy, load_policy
from llamarl.train.shards import trained
from llamarl.types import Completion, CompletionGroup, Problem, PromptGroup, Sampling, tokens_to_bytes

DOCUMENTS = make_test_documents(13)


def policy_of(folder: Path, lora: LoraConfig = LORA, dtype: torch.dtype = torch.float32, **how: object) -> Policy:
    """The policy of a folder with its adapters, if it has any."""
    adapter = folder / "adapter" if (folder / "adapter").exists() else None
    return load_policy(folder / "model", ComputeSettings(CPU, dtype, lora=lora, **how), adapter=adapter)  # type: ignore[arg-type]


def learner_of(policy: Policy) -> Learner:
    settings = TrainerConfig(lr=1e-2, warmup_updates=0)
    return Learner(policy, aipo_loss, settings=settings, algo=AlgoConfig(), updates=10)


def logprobs(policy: Policy) -> Tensor:
    return torch.cat([policy.logprobs(pack) for pack in policy.packs(DOCUMENTS)])


@pytest.mark.parametrize("shape", [SHAPE, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("targets", ["all", "attention", "mlp", ("q_proj", "v_proj", "down_proj")])
@pytest.mark.parametrize(
    "how", [{}, {"tokens_per_pack": 24}, {"recompute": "selective"}, {"recompute": "full"}, {"compiled": True}], ids=str
)
def test_gradients_are_those_of_the_merged_model(
    how: dict[str, object],
    targets: str | tuple[str, ...],
    shape: ModelSpec,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if "compiled" in how:
        request.getfixturevalue("traced_only")
    if targets != "all" and how:
        pytest.skip("one way of computing is enough")
    lora = LoraConfig(rank=3, alpha=6.0, targets=targets)
    adapter = save_both(tmp_path, lora, shape)
    learner = learner_of(policy_of(tmp_path, lora, torch.float32, **how))
    loss, expected = merged_gradients(adapter, DOCUMENTS, random_adapters(lora, shape), lora)
    seen = learner.accumulate(DOCUMENTS)
    assert seen.loss() == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(learner.optimizer.gradients(), expected)


def test_logprobs_are_those_of_the_merged_model_and_of_the_base_when_switched_off(tmp_path: Path) -> None:
    adapter = save_both(tmp_path)
    policy = policy_of(tmp_path)
    how = ComputeSettings(CPU, torch.float32)
    merged = logprobs(Policy(load_merged(adapter, dtype=torch.float32), how))
    base = logprobs(load_policy(tmp_path / "model", how))
    assert torch.allclose(logprobs(policy), merged, atol=1e-5)
    assert (merged - base).abs().mean() > 0.1, "the adapters change what the model says"
    assert policy.model.adapters is not None
    with policy.model.adapters.off():
        assert torch.equal(logprobs(policy), base)
    assert torch.allclose(logprobs(policy), merged, atol=1e-5)


def test_version_0_is_the_base_exactly_and_follows_from_the_seed(tmp_path: Path) -> None:
    save_both(tmp_path)
    base, how = tmp_path / "model", ComputeSettings(CPU, torch.float32, lora=LORA)
    policy, same, other = (load_policy(base, how, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(logprobs(policy), logprobs(load_policy(base, ComputeSettings(CPU, torch.float32))))
    mine, theirs, others = (trained(one.model) for one in (policy, same, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not any(torch.equal(mine[name], others[name]) for name in mine if "lora_A" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_adapters_are_trained_and_have_state(dtype: torch.dtype, tmp_path: Path) -> None:
    """The base is held in the type of the passes and keeps every bit; adapters and their moments are fp32."""
    save_both(tmp_path)
    policy = policy_of(tmp_path, dtype=dtype)
    learner = learner_of(policy)
    before = {name: one.detach().clone() for name, one in policy.model.named_parameters()}
    for update in range(2):
        learner.step(update, learner.accumulate(DOCUMENTS).loss())
    adapters = trained(policy.model)
    for name, parameter in policy.model.named_parameters():
        if name in adapters:
            assert parameter.dtype == torch.float32 and not torch.equal(parameter, before[name]), name
        else:
            assert parameter.dtype == policy.computing.weight_dtype
            assert torch.equal(parameter, before[name]) and parameter.grad is None, name
    states = learner.optimizer.state_tensors()
    assert {name.partition("/")[0] for name in states} == adapters.keys()
    assert all(one.dtype == torch.float32 for one in states.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_passes_go_where_wide_passes_go(dtype: torch.dtype, tmp_path: Path) -> None:
    save_both(tmp_path)
    grads = []
    for one in (torch.float32, dtype):
        learner = learner_of(policy_of(tmp_path, dtype=one))
        learner.accumulate(DOCUMENTS)
        grads.append(torch.cat([grad.flatten() for grad in learner.optimizer.gradients().values()]))
    assert torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0) > 0.95


def test_adapters_of_other_settings_are_refused_with_the_settings_to_take(tmp_path: Path) -> None:
    save_both(tmp_path, LoraConfig(rank=2, alpha=5.0, targets="mlp"))
    with pytest.raises(InputError, match=r"set model\.lora\.rank=2 model\.lora\.alpha=5 model\.lora\.targets=mlp"):
        policy_of(tmp_path)


# What is served: `EffectGap`


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_fault_below_rounding_is_noticed(share: float) -> None:
    """Rounding of 0.01, and an effect of 0.005 of which only a share is served."""
    generator = torch.Generator().manual_seed(0)
    effect, rounding = (torch.randn(1200, generator=generator) * size for size in (0.005, 0.01))
    tolerance = EffectTolerance(least=0.03)
    sound = EffectGap.of(effect, effect + rounding, torch.zeros(1200))
    assert sound.agrees(tolerance) and sound.served == pytest.approx(1, abs=0.2)
    faulty = EffectGap.of(effect, share * effect + rounding, torch.zeros(1200))
    assert faulty.gap < tolerance.least and not faulty.agrees(tolerance)


@pytest.mark.parametrize("true", [0.0, 0.03])
def test_an_effect_that_is_rounding_on_both_sides_proves_nothing(true: float) -> None:
    """As measured by a job with 64 layers of random weights: the effect was 0.03, the base's difference 0.07 and the share
    0.00; it was stopped though it was sound. What the sides have in common is measured without being watered down."""
    generator = torch.Generator().manual_seed(0)
    common, trained, served, second = (
        torch.randn(4000, generator=generator) * size for size in (true, 0.03, 0.05, 0.06)
    )
    base = torch.full((4000,), 0.07)
    assert not EffectGap.of(common + trained, common + served, base).agrees(EffectTolerance())
    sound = EffectGap.of(common + trained, common + served, base, 2 * common + second)
    assert sound.agrees(EffectTolerance())
    faulty = EffectGap.of(common + trained, served, base, 2 * common + second)
    assert faulty.agrees(EffectTolerance()) == (true == 0)


def test_the_second_effect_leaves_the_adapters_as_they_were(tmp_path: Path) -> None:
    save_both(tmp_path)
    policy = policy_of(tmp_path)
    before = {name: one.clone() for name, one in trained(policy.model).items()}
    with pytest.raises(ZeroDivisionError), adapter_check._enlarged(policy, 4.0):
        changed = {name for name, one in trained(policy.model).items() if not torch.equal(one, before[name])}
        assert changed == {name for name in before if ".lora_B." in name}
        _ = 1 / 0
    assert all(torch.equal(one, before[name]) for name, one in trained(policy.model).items())


def test_without_an_effect_only_the_difference_counts() -> None:
    nothing = torch.zeros(5)
    assert EffectGap.of(nothing, nothing + 1e-6, nothing).agrees(EffectTolerance())
    assert not EffectGap.of(nothing, nothing + 1e-3, nothing).agrees(EffectTolerance())


def test_few_tokens_with_much_rounding_prove_nothing() -> None:
    """As measured by a job with fp8 products on answers of three tokens: it was stopped though it was sound."""
    effect = torch.tensor([0.9, 0.05, 0.04, 0.1, 0.06, 0.02])
    served = effect + torch.tensor([-0.3, 0.02, -0.05, 0.04, 0.01, -0.03])
    assert EffectGap.of(effect, served, torch.full((6,), 0.05)).agrees(EffectTolerance(least=0.03))


def test_the_same_answer_again_proves_nothing_more() -> None:
    """As measured by a job with an fp8 generator whose four answers were the same: three tokens, each counted four times."""
    prompt = PromptGroup(0, Problem("", ""), tokens_to_bytes([1, 2]), Sampling())
    answers = [
        Completion(tokens_to_bytes(tokens), b"", (), truncated=False) for tokens in ([5, 6, 7], [5, 6, 7], [5, 8, 7])
    ]
    group = CompletionGroup(prompt, tuple(answers))
    new = first_seen([(group, one) for one in answers])
    assert new.tolist() == [True] * 3 + [False] * 3 + [False, True, True]
    effect, served, base = (torch.tensor(one) for one in ([0.351, 0.016, 0.0], [0.235, 0.041, 0.0], [0.11, 0.02, 0.0]))
    assert EffectGap.of(effect, served, base).agrees(EffectTolerance(least=0.03))
    assert not EffectGap.of(*(one.repeat(4) for one in (effect, served, base))).agrees(EffectTolerance(least=0.03))
