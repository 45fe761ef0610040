"""fp16 operands: nearer to fp32 than bf16 ones, with the gradients of bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.models import lively_model
from helpers.odd_models import odd_model
from torch import Tensor
from torch.nn import functional as F

from llamarl.config import Config, TrainerConfig
from llamarl.errors import ConfigError
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.train.fp16 import WideLinear, take_half_operands, to_half


def narrow_model(name: str = "") -> Transformer:
    """Whose weights are bf16 numbers."""
    model = odd_model(name) if name else lively_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    return model.bfloat16()


def tokens_BT() -> Tensor:
    return torch.randint(1, 23, (4, 24), generator=torch.Generator().manual_seed(0))


def logprobs(model: Transformer) -> Tensor:
    tokens = tokens_BT()
    hidden = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), causal_attention)
    return torch.log_softmax(model.logits(hidden), -1)


def unchanged(model: Transformer) -> Transformer:
    return model


def halved(model: Transformer) -> Transformer:
    take_half_operands(model)
    return model


@torch.no_grad()
def last_state(model: Transformer) -> Tensor:
    """The residual stream after the last block."""
    seen: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    logprobs(model)
    return seen[0].float()


@pytest.mark.parametrize("name", ["", "llama", "olmo2", "gemma3_text"])
def test_states_are_several_times_nearer_to_those_of_fp32(name: str) -> None:
    exact, bf16, half = (last_state(change(narrow_model(name))) for change in (Transformer.float, unchanged, halved))
    assert (half - exact).abs().mean() < 0.3 * (bf16 - exact).abs().mean()


def test_gradients_are_those_of_fp32_as_nearly_as_bf16_has_them() -> None:
    found = {}
    ways: dict[str, Callable[[Transformer], Transformer]]
    ways = {"fp32": Transformer.float, "bf16": unchanged, "half": halved}
    for name, change in ways.items():
        model = change(narrow_model())
        F.nll_loss(logprobs(model)[:, :-1].flatten(0, 1), tokens_BT()[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        found[name] = torch.cat([one.grad.float().flatten() for one in model.parameters() if one.grad is not None])
        assert len(found[name]) == len(found["fp32"])
    error = {name: ((grad - found["fp32"]).norm() / found["fp32"].norm()).item() for name, grad in found.items()}
    assert error["half"] < max(1.2 * error["bf16"], 0.01), error


def test_weights_stay_what_they_are_and_where_they_are() -> None:
    model = narrow_model()
    before = {name: parameter for name, parameter in model.named_parameters()}
    take_half_operands(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] and after[name].dtype == torch.bfloat16 for name in before)
    assert isinstance(model.get_submodule("model.layers.0.mlp.down_proj"), WideLinear)


@pytest.mark.parametrize("value", [1e5, -1e38, torch.inf])
def test_what_is_too_large_for_fp16_becomes_its_largest_number(value: float) -> None:
    assert to_half(torch.tensor(value)).abs() == 65504


def test_products_that_are_shared_over_ranks_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer.dtype: float16 products are not shared over ranks; set trainer.tensor"
    ):
        Config(trainer=TrainerConfig(dtype="float16", tensor=2))
