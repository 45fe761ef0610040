"""Quantized weights and a quantized cache: the completions are those of the quantized model, and follow every new version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decoding import decode_all
from helpers.groups import prompt_group
from helpers.models import SHAPE, copy_weights, lively_model
from msgspec.structs import replace
from torch import Tensor

from llamarl.config.file import load_config
from llamarl.errors import ConfigError
from llamarl.generate import evaluate as evaluation
from llamarl.generate import llm
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.kv_cache import PagedCache, page_bytes
from llamarl.generate.limits import Limits, Precision
from llamarl.model.quantize import FP8, fp8_product, int8_product, quantize_rows
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.tasks.registry import make_task
from llamarl.types import CompletionGroup, bytes_to_floats, bytes_to_tokens

PROMPT = [5, 6, 7, 2, 9]
EVERY_PRECISION = [
    Precision(weights="int8"),
    Precision(weights="fp8"),
    Precision(kv_cache="fp8"),
    Precision(weights="fp8", kv_cache="fp8"),
]


def decoder_of(model: Transformer, precision: Precision, **settings: int) -> ContinuousDecoder:
    chosen = {"slots": 16, "max_prompt_tokens": 12, "max_new_tokens": 12, "page_tokens": 4, **settings}
    decoder = ContinuousDecoder(model, Limits(**chosen), eos_ids=(), seed=3, precision=precision)
    decoder.version = 0
    return decoder


def test_keys_that_fp8_cannot_hold_are_refused() -> None:
    """As those of Qwen2.5, whose first layer adds 354 to some."""
    model = lively_model(shape=replace(SHAPE, qkv_bias=True))
    model.get_parameter("model.layers.1.self_attn.k_proj.bias").data[3] = -354.0
    with pytest.raises(ConfigError, match=r"generator\.kv_cache: fp8 cannot hold .*layers\.1\..* adds up to 354; "):
        decoder_of(model, Precision(kv_cache="fp8"))
    decoder_of(model, Precision())


def narrow_attention(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
    """To keys and values as a narrow cache holds them."""
    return causal_attention(layer, q_BTHD, _through_fp8(k_BTKD), _through_fp8(v_BTKD))


def _through_fp8(x: Tensor) -> Tensor:
    values, scales = quantize_rows(x, FP8)
    return values.float() * scales[..., None]


@torch.no_grad()
def logprobs_under(model: Transformer, answer: list[int], *, narrow_cache: bool) -> Tensor:
    tokens_1T = torch.tensor([PROMPT + answer])
    attend = narrow_attention if narrow_cache else causal_attention
    hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], attend)
    scores_TV = model.logits(hidden_1TC[0, len(PROMPT) - 1 : -1])
    return torch.log_softmax(scores_TV, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def differences(done: CompletionGroup, model: Transformer, *, narrow_cache: bool) -> Tensor:
    return torch.cat(
        [
            torch.tensor(bytes_to_floats(one.behavior_logprobs))
            - logprobs_under(model, bytes_to_tokens(one.tokens).tolist(), narrow_cache=narrow_cache)
            for one in done.completions
        ]
    ).abs()


@pytest.mark.parametrize("precision", EVERY_PRECISION, ids=str)
def test_logprobs_are_those_of_the_quantized_model(precision: Precision) -> None:
    """The decoder quantizes its model in place, so that reading whole sequences with it is the plain twin."""
    model = lively_model()
    done = decode_all(decoder_of(model, precision), [prompt_group(PROMPT, samples=8, max_new_tokens=12)])[0]
    gap = differences(done, model, narrow_cache=precision.kv_cache == "fp8")
    # Where sums in another order fall on the other side of a border of fp8, a few tokens differ.
    assert gap.median() < 1e-5
    assert gap.mean() < 2e-3
    plain = differences(done, lively_model(), narrow_cache=False)
    assert plain.median() > 30 * float(gap.median().clamp(min=1e-6)), (
        "quantizing changed nothing: the test would not see it missing"
    )


@pytest.mark.parametrize("precision", EVERY_PRECISION, ids=str)
def test_paging_refill_and_sharing_change_nothing(precision: Precision) -> None:
    groups = [
        prompt_group(PROMPT[: 1 + i % 5] * 2, ordinal=i, samples=1 + i % 4, max_new_tokens=4 + i % 8) for i in range(16)
    ]
    expected = decode_all(decoder_of(lively_model(), precision), groups)
    found = decode_all(decoder_of(lively_model(), precision, num_pages=13, slots=20), groups)
    pairs = [
        (mine.tokens, theirs.tokens)
        for ordinal, group in expected.items()
        for mine, theirs in zip(found[ordinal].completions, group.completions, strict=True)
    ]
    same = sum(mine == theirs for mine, theirs in pairs) / len(pairs)
    assert same >= (1.0 if precision == Precision(weights="int8") else 0.9), "more than borders of fp8 can explain"


@pytest.mark.parametrize("number", [1, 0])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_version_is_quantized_when_it_arrives(kind: str, number: int) -> None:
    """Also one with the number of the last, which a trainer publishes again with other bytes after a rewind."""
    serving, new = lively_model(0), lively_model(1)
    precision = Precision(weights=kind)  # type: ignore[arg-type]
    decoder = decoder_of(serving, precision)
    group = prompt_group(PROMPT, samples=4, max_new_tokens=8)
    before = decode_all(decoder, [group])[0]
    copy_weights(new, serving)
    decoder.version = number
    after = decode_all(decoder, [group])[0]
    fresh = decoder_of(lively_model(1), precision)
    fresh.version = number
    assert after == decode_all(fresh, [group])[0]
    assert after != before


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_without_the_wide_weights_nothing_is_computed_otherwise_and_their_memory_is_gone(kind: str) -> None:
    both, alone = lively_model(0), lively_model(0)
    group = prompt_group(PROMPT, samples=4, max_new_tokens=8)
    wide = decoder_of(both, Precision(weights=kind))  # type: ignore[arg-type]
    narrow = decoder_of(alone, Precision(weights=kind, keep_wide=False))  # type: ignore[arg-type]
    assert decode_all(narrow, [group]) == decode_all(wide, [group])
    held = {name: parameter for name, parameter in alone.named_parameters() if name.endswith("_proj.weight")}
    assert held and all(parameter.dtype.itemsize == 1 for parameter in held.values())
    scales = dict(alone.named_buffers())
    assert scales.keys() == {f"{name}_scale" for name in held}
    for name, parameter in both.named_parameters():
        if name in held:
            near = held[name].float() * scales[f"{name}_scale"]
            assert (near - parameter).abs().max() <= parameter.abs().max() / 14


def test_narrow_weights_that_arrive_are_what_is_computed_with() -> None:
    serving, new = lively_model(0), lively_model(1)
    decoder, fresh = (decoder_of(model, Precision(weights="fp8", keep_wide=False)) for model in (serving, new))
    group = prompt_group(PROMPT, samples=4, max_new_tokens=8)
    before = decode_all(decoder, [group])
    copy_weights(new, serving)
    for mine, theirs in zip(serving.buffers(), new.buffers(), strict=True):
        mine.copy_(theirs)
    assert decode_all(decoder, [group]) == decode_all(fresh, [group]) != before


def test_an_evaluation_decodes_as_the_generators_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ContinuousDecoder] = []

    class Seen(ContinuousDecoder):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            made.append(self)

    monkeypatch.setattr(llm, "ContinuousDecoder", Seen)
    settings = ["generator.quantize=fp8", "generator.kv_cache=fp8", "generator.kv_pages=77", "generator.burst=3"]
    config = load_config(None, settings)
    problems = make_task(config.task, config.seed).evaluation(4)
    found = evaluation.evaluate(
        config, problems, samples=1, temperature=0.0, device="cpu", progress=lambda done, asked: None
    )
    assert found.problems == 4
    limits, held = made[0].limits, dict(made[0].model.named_parameters())
    assert (limits.slots, limits.num_pages, limits.burst) == (4, 77, 3)
    assert held["model.layers.0.self_attn.q_proj.weight"].dtype == FP8


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_quantized_rows_are_as_near_as_their_format_allows(dtype: torch.dtype) -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-4], [1.0], [1e4], [3.0], [0.0], [7.0], [1e-20]]
    )
    values, scales = quantize_rows(x, dtype)
    error = (values.float() * scales[:, None] - x).abs()
    largest = x.abs().amax(1, keepdim=True)
    allowed = x.abs() / 16 + largest * 2**-9 if dtype == FP8 else largest / 127 / 2
    assert (error <= allowed * 1.001 + 1e-12).all()
    assert torch.isfinite(values.float()).all()


def test_products_of_quantized_rows_are_those_of_what_they_stand_for() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((5, 48), (16, 48), (16,)))
    narrow_x, narrow_weight = quantize_rows(x, FP8), quantize_rows(weight, FP8)
    wide = [values.float() * scales[:, None] for values, scales in (narrow_x, narrow_weight)]
    found = fp8_product(narrow_x, narrow_weight, bias, torch.float32)
    torch.testing.assert_close(found, wide[0] @ wide[1].t() + bias, atol=1e-4, rtol=1e-5)
    values, scales = quantize_rows(weight, torch.int8)
    expected = x @ (values.float() * scales[:, None]).t()
    torch.testing.assert_close(int8_product(x, (values, scales), None), expected, atol=1e-4, rtol=1e-5)


def test_a_page_in_fp8_takes_little_more_than_half_of_one_in_bf16() -> None:
    caches = {
        dtype: PagedCache(SHAPE, 10, 4, dtype=dtype, device="cpu") for dtype in (FP8, torch.bfloat16, torch.float32)
    }
    for dtype, cache in caches.items():
        held = sum(part.numel() * part.itemsize for part in cache._parts)
        assert held == 11 * page_bytes(SHAPE, 4, dtype)
    assert page_bytes(SHAPE, 4, FP8) == page_bytes(SHAPE, 4, torch.bfloat16) * (SHAPE.head_dim + 4) // (
        2 * SHAPE.head_dim
    )
