"""A frozen base in one piece of memory: the same model, joined without a copy; in fp8 the same for trainer and generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lora import LORA, base_of, random_adapters, save_both
from helpers.models import SHAPE, lively_model
from helpers.training import CPU, make_test_documents
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from llamarl.algo.losses import aipo_loss
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.model.checkpoint import load_model, save_model
from llamarl.model.quantize import FP8, quantize, quantize_rows
from llamarl.model.transformer import Transformer, causal_attention, fuse
from llamarl.model_spec import ModelSpec
from llamarl.train import narrow_base
from llamarl.train.learner import Learner
from llamarl.train.policy import ComputeSettings, Policy, load_policy

SHAPES = {
    "tied": replace(SHAPE, tied_head=True),
    "untied": replace(SHAPE, tied_head=False),
    "biases": replace(SHAPE, qkv_bias=True),
    "head norms": replace(SHAPE, qk_norm=True),
}
DOCUMENTS = make_test_documents(9)


@torch.inference_mode()
def logits(model: Transformer) -> Tensor:
    tokens_1T = torch.arange(11)[None]
    return model.logits(model(tokens_1T, tokens_1T, causal_attention))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_the_model_of_the_folder_and_is_joined_where_it_lies(shape: ModelSpec, tmp_path: Path) -> None:
    save_model(lively_model(shape=shape), tmp_path / "model")
    base = base_of(tmp_path / "model")
    model, expected = base.model(), load_model(tmp_path / "model")
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter) and not model.get_parameter(name).requires_grad
    fuse(model)
    fuse(expected)
    assert torch.equal(logits(model), logits(expected))
    first, end = base.memory.data_ptr(), base.memory.data_ptr() + len(base.memory)
    block: Any
    for block in model.model.layers:
        for joined in (block.self_attn.fused, block.mlp.fused):
            assert first <= joined.weight.data_ptr() < end, "copied"
    assert base.layout.num_bytes < 1.05 * sum(one.nbytes for one in expected.parameters()) + 256 * 20 * shape.num_layers


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_fp8_it_is_what_a_generator_makes_of_the_wide_model(shape: ModelSpec, tmp_path: Path) -> None:
    save_model(lively_model(shape=shape), tmp_path / "model")
    base = base_of(tmp_path / "model", "fp8")
    model, expected = base.model(), load_model(tmp_path / "model")
    for one in (model, expected):
        fuse(one)
        quantize(one, "fp8", keep_wide=False)
    assert torch.equal(logits(model), logits(expected))
    held = [one for one in model.parameters() if one.dtype == FP8]
    assert len(held) == 7 * shape.num_layers
    first, end = base.memory.data_ptr(), base.memory.data_ptr() + len(base.memory)
    assert all(first <= one.data_ptr() < end for one in model.parameters())


def narrow_policy(folder: Path) -> Policy:
    how = ComputeSettings(CPU, torch.float32, lora=LORA)
    return load_policy(folder / "model", how, adapter=folder / "adapter", base=base_of(folder / "model", "fp8"))


def gradients(policy: Policy) -> tuple[float, dict[str, Tensor]]:
    settings = TrainerConfig(lr=1e-2, warmup_updates=0)
    learner = Learner(policy, aipo_loss, settings=settings, algo=AlgoConfig(), updates=10)
    loss = learner.accumulate(DOCUMENTS).loss()
    return loss, {name: grad.clone() for name, grad in learner.optimizer.gradients().items()}


def naive_product(layer: narrow_base.NarrowLinear, x: Tensor) -> Tensor:
    """With a wide weight, and rounding that gradients pass as if it was not there."""
    values, scales = quantize_rows(x, FP8)
    rounded = x + (values.float() * scales[..., None] - x).detach()
    return F.linear(rounded, layer.weight.float() * layer.weight_scale, layer.bias)


def test_training_beside_fp8_has_the_gradients_of_the_wide_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_both(tmp_path)
    loss, found = gradients(narrow_policy(tmp_path))
    monkeypatch.setattr(narrow_base.NarrowLinear, "forward", naive_product)
    expected_loss, expected = gradients(narrow_policy(tmp_path))
    assert (
        loss == pytest.approx(expected_loss, abs=1e-5) and found.keys() == expected.keys() == random_adapters().keys()
    )
    for name, grad in expected.items():
        assert grad.abs().max() > 0 and (found[name] - grad).abs().max() <= 1e-5 * max(1.0, float(grad.abs().max())), (
            name
        )


def test_no_wide_copy_of_a_narrow_base_is_held(tmp_path: Path) -> None:
    save_both(tmp_path)
    policy = narrow_policy(tmp_path)
    layers = [one for one in policy.model.modules() if isinstance(one, narrow_base.NarrowLinear)]
    assert len(layers) == 7 * SHAPE.num_layers and all(one.weight.dtype == FP8 for one in layers)
