"""Quantized products on a GPU compute what their plain twins compute, and decoding with them is sound."""

from __future__ import annotations

import pytest
import torch
from helpers.groups import prompt_group
from torch import Tensor

from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits, Precision
from llamarl.model.checkpoint import random_model
from llamarl.model.ops import rms_norm, silu_times
from llamarl.model.quantize import FP8, fp8_product, int8_product, quantize_rows
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.model_spec import ModelSpec
from llamarl.types import CompletionGroup, bytes_to_floats, bytes_to_tokens

pytestmark = pytest.mark.gpu
SHAPE = ModelSpec(
    vocab_size=1000,
    hidden_size=512,
    intermediate_size=1408,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_positions=512,
)


def normal(device: torch.device, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator(device=device).manual_seed(0), device=device).bfloat16()


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("size", [64, 576, 14336])
def test_rows_are_quantized_alike(size: int, dtype: torch.dtype, device: torch.device) -> None:
    from llamarl.model import quantize_kernels

    x = normal(device, 33, size) * torch.logspace(-4, 3, 33, device=device)[:, None].bfloat16()
    x[5] = 0
    found, expected = quantize_kernels.quantize_rows(x, dtype), quantize_rows(x, dtype)
    torch.testing.assert_close(found[1], expected[1], atol=0, rtol=1e-6)
    same = (found[0].view(torch.uint8) == expected[0].view(torch.uint8)).float().mean()
    assert same > 0.999, "more than ties of rounding"


@pytest.mark.parametrize("size", [64, 576, 4096])
def test_norms_are_quantized_alike(size: int, device: torch.device) -> None:
    from llamarl.model import quantize_kernels

    x, weight = 5 * normal(device, 2, 17, size).float(), normal(device, size)
    found, expected = quantize_kernels.norm_rows(x, weight, 1e-5), quantize_rows(rms_norm(x, weight, 1e-5), FP8)
    torch.testing.assert_close(found[1], expected[1], atol=0, rtol=1e-2)
    wide = [values.float() * scales[..., None] for values, scales in (found, expected)]
    assert (wide[0] - wide[1]).norm() / wide[1].norm() < 0.01, "more than borders of rounding"


@pytest.mark.parametrize("size", [64, 576, 14336])
def test_gates_are_quantized_alike(size: int, device: torch.device) -> None:
    from llamarl.model import quantize_kernels
    from llamarl.model.kernels import Terms

    parts = 2 * normal(device, 1, 2, 17, 2 * size)
    scales = (0.5 + torch.rand(34, device=device), 0.5 + torch.rand(2 * size, device=device))
    gate_up = parts[0].float() * scales[0].view(2, 17, 1) * scales[1]
    found = quantize_kernels.silu_rows(Terms(parts, scales))
    expected = quantize_rows(silu_times(gate_up).to(torch.bfloat16), FP8)
    torch.testing.assert_close(found[1], expected[1], atol=0, rtol=1e-2)
    wide = [values.float() * scales[..., None] for values, scales in (found, expected)]
    assert (wide[0] - wide[1]).norm() / wide[1].norm() < 0.01, "more than borders of rounding"


def test_what_a_product_leaves_to_be_added_is_added_before_the_norm(device: torch.device) -> None:
    from llamarl.model import kernels, quantize_kernels

    parts, weight = normal(device, 1, 34, 576), normal(device, 576)
    scales = (torch.rand(34, device=device), torch.rand(576, device=device))
    terms = kernels.Terms(parts, scales)
    residual, summed = (normal(device, 2, 17, 576).float() for _ in range(2))
    kernels.add_terms(summed, terms)
    expected = residual + (parts[0].float() * scales[0][:, None] * scales[1]).view_as(residual)
    torch.testing.assert_close(summed, expected)
    found, plain = (
        quantize_kernels.norm_rows(residual, weight, 1e-5, terms),
        quantize_kernels.norm_rows(summed, weight, 1e-5),
    )
    assert torch.equal(residual, summed)
    assert torch.equal(found[0].view(torch.uint8), plain[0].view(torch.uint8)) and torch.equal(found[1], plain[1])


@pytest.mark.parametrize("rows", [1, 17, 256, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_products(rows: int, bias: bool, device: torch.device) -> None:
    from llamarl.model import quantize_kernels

    x, weight = normal(device, rows, 576), normal(device, 320, 576) / 24
    offset = normal(device, 320) if bias else None
    for dtype in (FP8, torch.int8):
        narrow = quantize_rows(weight, dtype)
        if dtype == FP8:
            narrow_x = quantize_rows(x, FP8)
            found = fp8_product(narrow_x, narrow, offset, torch.bfloat16)
            cpu_x, cpu_weight = (tuple(part.cpu() for part in pair) for pair in (narrow_x, narrow))
            expected = fp8_product(cpu_x, cpu_weight, None if offset is None else offset.cpu(), torch.float32)  # type: ignore[arg-type]
        else:
            found = quantize_kernels.int8_product(x, *narrow, offset)
            expected = int8_product(x.float(), narrow, offset).cpu()
        error = (found.float().cpu() - expected).norm() / expected.norm()
        assert error < 5e-3, (dtype, error)


@torch.inference_mode()
def logprobs_under(model: Transformer, prompt: list[int], answer: list[int]) -> Tensor:
    device = model.lm_head.weight.device
    tokens = torch.tensor([prompt + answer], device=device)
    hidden = model(tokens, torch.arange(tokens.shape[1], device=device)[None], causal_attention)
    scores = torch.log_softmax(model.logits(hidden[0, len(prompt) - 1 : -1]), -1)
    return scores.gather(1, torch.tensor(answer, device=device)[:, None])[:, 0].cpu()


def gap(done: CompletionGroup, model: Transformer, prompt: list[int]) -> float:
    return (
        torch.cat(
            [
                torch.tensor(bytes_to_floats(one.behavior_logprobs))
                - logprobs_under(model, prompt, bytes_to_tokens(one.tokens).tolist())
                for one in done.completions
            ]
        )
        .abs()
        .mean()
        .item()
    )


@pytest.mark.parametrize(
    "precision",
    [
        Precision(),
        Precision(weights="int8"),
        Precision(weights="fp8"),
        Precision(kv_cache="fp8"),
        Precision(weights="fp8", kv_cache="fp8"),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_quantized_model(precision: Precision, device: torch.device) -> None:
    """Whole sequences read by the quantized model, with keys and values as they are. A product rounds to fp8 what came out of
    other sums in bf16 here and there, so some inputs fall on either side of a border; a wrong scale would cost whole nats."""
    model = random_model(SHAPE, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    decoder = ContinuousDecoder(
        model, Limits(slots=64, max_prompt_tokens=32, max_new_tokens=64), eos_ids=(), seed=3, precision=precision
    )
    decoder.version = 0
    prompt = list(range(7, 37))
    decoder.add(prompt_group(prompt, samples=64, max_new_tokens=64))
    while not (done := decoder.step()):
        pass
    found = gap(done[0], model, prompt)
    print(f"{precision}: mean |difference| to its plain twin {found:.5f}")
    assert found < {"none": 0.03, "int8": 0.03, "fp8": 0.3}[precision.weights] + (
        0.3 if precision.kv_cache == "fp8" else 0
    )
