"""Adapters in the generator: completions are those of the merged model, in every precision, and follow every new version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.decoding import decode_all
from helpers.experts import SHAPE as MIXTURE
from helpers.groups import prompt_group
from helpers.lora import put_adapters, random_adapters, save_both
from helpers.models import SHAPE, lively_model
from msgspec.structs import replace
from torch import Tensor

from llamarl.config import LoraConfig
from llamarl.config.file import parse_config
from llamarl.errors import ConfigError
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import AS_THE_MODEL, Limits, Precision
from llamarl.layout.boxes import whole
from llamarl.model.adapter_folder import load_merged
from llamarl.model.lora_serving import merge_adapters, serve_adapters
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.model_spec import ModelSpec
from llamarl.types import CompletionGroup, bytes_to_floats, bytes_to_tokens

PROMPT = [5, 6, 7, 2, 9]
QWEN = replace(SHAPE, qkv_bias=True)
GRANITE = replace(
    MIXTURE, family="granitemoe", dense_layers=(), qk_norm=False, attention_scale=0.3, intermediate_size=16
)


def decoder_of(
    model: Transformer, lora: LoraConfig, precision: Precision = AS_THE_MODEL, *, merged: bool = False
) -> ContinuousDecoder:
    add = merge_adapters if merged else serve_adapters
    return ContinuousDecoder(
        model,
        Limits(slots=16, max_prompt_tokens=12, max_new_tokens=12, page_tokens=4),
        eos_ids=(),
        seed=3,
        precision=precision,
        add_adapters=lambda one: add(one, lora, lambda parameter: parameter.shape),
    )


def load(decoder: ContinuousDecoder, adapters: dict[str, Tensor], version: int) -> None:
    put_adapters(decoder.model, adapters, lambda parameter: whole(parameter.shape))
    decoder.version = version


def sample(decoder: ContinuousDecoder, ordinal: int = 0) -> CompletionGroup:
    return decode_all(decoder, [prompt_group(PROMPT, ordinal=ordinal, samples=8, max_new_tokens=10)])[ordinal]


@torch.no_grad()
def gap(done: CompletionGroup, model: Transformer) -> float:
    """Mean difference of log-probs from those of another model."""
    found = []
    for one in done.completions:
        answer = bytes_to_tokens(one.tokens).tolist()
        tokens_1T = torch.tensor([PROMPT + answer])
        hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], causal_attention)
        scores_TV = model.logits(hidden_1TC[0, len(PROMPT) - 1 : -1])
        logprobs = torch.log_softmax(scores_TV, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append((torch.tensor(bytes_to_floats(one.behavior_logprobs)) - logprobs).abs())
    return torch.cat(found).mean().item()


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, QWEN], ids=["llama", "qwen"])
@pytest.mark.parametrize("targets", ["all", "attention", "mlp", ("v_proj", "up_proj", "o_proj")])
def test_completions_are_those_of_the_merged_model(
    targets: str | tuple[str, ...], shape: ModelSpec, merged: bool, tmp_path: Path
) -> None:
    """Also where only some of the joined layers have adapters."""
    lora = LoraConfig(rank=3, alpha=6.0, targets=targets)
    expected = load_merged(save_both(tmp_path, lora, shape), dtype=torch.float32)
    decoder = decoder_of(lively_model(shape=shape), lora, merged=merged)
    load(decoder, random_adapters(lora, shape), 1)
    done = sample(decoder)
    assert gap(done, expected) < 1e-5
    assert gap(done, lively_model(shape=shape)) > 1e-2


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("shape", [MIXTURE, GRANITE], ids=["qwen3_moe", "granitemoe"])
@pytest.mark.parametrize("targets", ["all", "mlp", ("experts", "v_proj")])
def test_completions_with_adapters_of_experts_are_those_of_the_merged_model(
    targets: str | tuple[str, ...], shape: ModelSpec, merged: bool, tmp_path: Path
) -> None:
    test_completions_are_those_of_the_merged_model(targets, shape, merged, tmp_path)


@pytest.mark.parametrize("merged", [False, True])
def test_every_version_is_followed_and_the_base_is_never_lost(merged: bool, tmp_path: Path) -> None:
    """The first version is the base; later ones leave no trace of those before; the switch leads back to the base."""
    lora = LoraConfig(rank=3, alpha=6.0)
    expected = load_merged(save_both(tmp_path, lora, seed=9), dtype=torch.float32)
    decoder = decoder_of(lively_model(), lora, merged=merged)
    decoder.version = 0
    assert gap(sample(decoder), lively_model()) < 1e-6
    for version in range(1, 9):
        load(decoder, random_adapters(lora, seed=version), version)
    assert gap(sample(decoder, 1), expected) > 1e-2
    load(decoder, random_adapters(lora, seed=9), 9)
    assert gap(sample(decoder, 2), expected) < 1e-5
    assert decoder.model.adapters is not None
    with decoder.model.adapters.off():
        assert gap(sample(decoder, 3), lively_model()) < 1e-6
    assert gap(sample(decoder, 4), expected) < 1e-5


@pytest.mark.parametrize("shape", [SHAPE, MIXTURE], ids=["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_adapters_stand_beside_a_quantized_base(kind: str, shape: ModelSpec, tmp_path: Path) -> None:
    """They are as near to the merged model as the quantized base is to the base, and far from the base."""
    lora, precision = LoraConfig(rank=3, alpha=6.0), Precision(weights=kind, keep_wide=False)  # type: ignore[arg-type]
    expected = load_merged(save_both(tmp_path, lora, shape), dtype=torch.float32)
    decoder = decoder_of(lively_model(shape=shape), lora, precision)
    decoder.version = 0
    floor = gap(sample(decoder), lively_model(shape=shape))
    load(decoder, random_adapters(lora, shape), 1)
    done = sample(decoder, 1)
    assert gap(done, expected) < 4 * floor < gap(done, lively_model(shape=shape))


def test_a_version_published_again_with_other_bytes_is_taken() -> None:
    lora = LoraConfig(rank=3, alpha=6.0)
    decoder = decoder_of(lively_model(), lora, merged=True)
    load(decoder, random_adapters(lora), 1)
    first = sample(decoder)
    load(decoder, random_adapters(lora, seed=1), 1)
    assert sample(decoder, 0).completions != first.completions


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"generator": {"lora": "merged"}}, "generator.lora: merged cannot take effect without adapters"),
        (
            {"model": {"lora": {"rank": 2}}, "generator": {"lora": "merged", "quantize": "int8"}},
            "generator.lora: adapters cannot be merged into weights with generator.quantize=int8",
        ),
        ({"model": {"adapter": "somewhere"}}, "model.adapter: adapters are trained with model.lora"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_config(settings)
