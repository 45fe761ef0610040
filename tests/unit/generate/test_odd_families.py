"""Windows, norms, biases, softcaps and multipliers in the generator: it samples what one pass over all tokens says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.decoding import decode_all
from helpers.groups import prompt_group
from helpers.lora import put_adapters, random_adapters
from helpers.odd_models import ALL, EXPERTS, odd_model
from msgspec.structs import replace
from torch import Tensor

from llamarl.config import LoraConfig
from llamarl.generate.attention import ExtendAttention, PrefillAttention
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.limits import AS_THE_MODEL, Limits, Precision
from llamarl.layout.boxes import whole
from llamarl.model.adapter_folder import load_merged, save_adapter
from llamarl.model.checkpoint import save_model
from llamarl.model.experts import ExpertMLP
from llamarl.model.lora_serving import merge_adapters, serve_adapters
from llamarl.model.quantize import Narrow, quantize
from llamarl.model.transformer import Transformer, causal_attention, fuse
from llamarl.types import CompletionGroup, bytes_to_floats, bytes_to_tokens

PROMPT = [5, 6, 7, 2, 9, 1, 4]
LORA = LoraConfig(rank=3, alpha=6.0)


def sample(model: Transformer, precision: Precision = AS_THE_MODEL, **settings: int) -> CompletionGroup:
    decoder = decoder_of(model, precision, "", LORA, **settings)
    decoder.version = 0
    return decode_all(decoder, [prompt_group(PROMPT, samples=6, max_new_tokens=14)])[0]


def decoder_of(
    model: Transformer, precision: Precision = AS_THE_MODEL, lora: str = "", how: LoraConfig = LORA, **settings: int
) -> ContinuousDecoder:
    chosen = {"slots": 8, "max_prompt_tokens": 12, "max_new_tokens": 14, "page_tokens": 4, **settings}
    add = {"": None, "beside": serve_adapters, "merged": merge_adapters}[lora]
    return ContinuousDecoder(
        model,
        Limits(**chosen),
        eos_ids=(),
        seed=3,
        precision=precision,
        add_adapters=(lambda one: add(one, how, lambda parameter: parameter.shape)) if add else None,
    )


@torch.no_grad()
def gaps(done: CompletionGroup, model: Transformer) -> Tensor:
    """Differences of log-probs from those of one pass of another model."""
    found = []
    for one in done.completions:
        answer = bytes_to_tokens(one.tokens).tolist()
        tokens_1T = torch.tensor([PROMPT + answer])
        hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], causal_attention)
        scores_TV = model.logits(hidden_1TC[0, len(PROMPT) - 1 : -1])
        logprobs = torch.log_softmax(scores_TV, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append((torch.tensor(bytes_to_floats(one.behavior_logprobs)) - logprobs).abs())
    return torch.cat(found)


@pytest.mark.parametrize("name", ALL)
def test_sampled_logprobs_are_those_of_one_pass(name: str) -> None:
    """Prompts in pages that samples share, and pages so few that sequences are paused and read again."""
    assert gaps(sample(odd_model(name)), odd_model(name)).max() < 1e-5
    assert gaps(sample(odd_model(name), num_pages=12), odd_model(name)).max() < 1e-5


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_logprobs_are_those_of_the_quantized_model(name: str, weights: str) -> None:
    model = odd_model(name)
    gap = gaps(sample(model, Precision(weights=weights)), model)  # type: ignore[arg-type]
    assert gap.median() < 1e-5
    assert gap.mean() < 5e-3
    assert gaps(sample(odd_model(name)), model).median() > 1e-4, "quantizing changed nothing"


@pytest.mark.parametrize("name", ALL)
def test_tokens_behind_cached_ones_see_their_window(name: str) -> None:
    """A reply of five tokens, then a longer one, each over the edges of pages and windows."""
    model, page = odd_model(name), 4
    tokens_1T = torch.tensor([[1 + 5 * number % 22 for number in range(20)]])
    positions_1T = torch.arange(20)[None]
    pages_1T = 1 + positions_1T // page
    cache = PagedCache(model.shape, 6, page, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        expected = model(tokens_1T, positions_1T, causal_attention)
        found = [model(tokens_1T[:, :6], positions_1T[:, :6], PrefillAttention(cache, pages_1T[:, :6]))]
        for part in (slice(6, 11), slice(11, 20)):
            attend = ExtendAttention(cache, torch.arange(1, 7)[None], positions_1T[:, part], pages_1T[:, part])
            found.append(model(tokens_1T[:, part], positions_1T[:, part], attend))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-5)


def quantized(name: str, kind: str, *, keep_wide: bool = True) -> tuple[Transformer, list[Narrow]]:
    model = odd_model(name)
    fuse(model)
    return model, quantize(model, kind, keep_wide=keep_wide)  # type: ignore[arg-type]


@torch.no_grad()
def hidden_of(model: Transformer) -> Tensor:
    found: Tensor = model(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None], causal_attention)
    return found


@pytest.mark.parametrize("weights", ["int8", "fp8"])
@pytest.mark.parametrize("name", EXPERTS)
def test_every_row_of_every_expert_has_its_scale(name: str, weights: str) -> None:
    """The router and what it reads keep their precision."""
    plain, (model, _) = odd_model(name), quantized(name, weights)
    names = 0
    for key, module in model.named_modules():
        if isinstance(module, ExpertMLP):
            names += 1
            wide: Any = plain.get_submodule(key)
            assert torch.equal(module.gate.weight, wide.gate.weight)
            assert module.experts.narrow is not None and module.experts.narrow.scales is not None
            pairs = (wide.experts.gate_up_proj, wide.experts.down_proj), module.experts.narrow.scales
            for of, values, scales in zip(pairs[0], module.experts.narrow[:2], pairs[1], strict=True):
                assert values.element_size() == 1 and scales.shape == of.shape[:-1]
                stands_for = values.float() * scales[..., None]
                largest = of.abs().amax(-1, keepdim=True)
                assert ((stands_for - of).abs() <= largest * (1 / 250 if weights == "int8" else 1 / 16)).all()
                assert not torch.equal(stands_for, of)
    assert names == len(EXPERTS[name].expert_layers)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_experts_of_a_new_version_are_quantized_when_it_arrives(weights: str) -> None:
    model, narrow = quantized("qwen3_moe", weights)
    before = hidden_of(model)
    new = dict(odd_model("qwen3_moe", seed=1).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.copy_(new[name])
    assert torch.equal(hidden_of(model), before), "products take the narrow copies"
    for one in narrow:
        one.refresh()
    expected = odd_model("qwen3_moe")
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if ".experts." in name:
                parameter.copy_(new[name])
    fuse(expected)
    quantize(expected, weights)  # type: ignore[arg-type]
    assert torch.equal(hidden_of(model), hidden_of(expected)) and not torch.equal(hidden_of(model), before)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_wide_experts_are_freed_where_none_arrive(weights: str) -> None:
    (model, none), (kept, some) = (quantized("olmoe", weights, keep_wide=wide) for wide in (False, True))
    experts = [one for name, one in model.named_parameters() if ".experts." in name]
    assert not none and len(some) == 3 * len(EXPERTS["olmoe"].expert_layers)
    assert experts and all(one.element_size() == 1 for one in experts)
    assert torch.equal(hidden_of(model), hidden_of(kept))


@pytest.mark.parametrize("lora", ["beside", "merged"])
@pytest.mark.parametrize("name", [name for name in ALL if name != "phi3"])
def test_adapters_are_served_as_merged(name: str, lora: str, tmp_path: Path) -> None:
    how = replace(LORA, targets="attention") if name in EXPERTS else LORA
    adapters = random_adapters(how, ALL[name])
    save_model(odd_model(name), tmp_path / "model")
    save_adapter(adapters, how, ALL[name], tmp_path / "adapter", tmp_path / "model")
    decoder = decoder_of(odd_model(name), lora=lora, how=how)
    put_adapters(decoder.model, adapters, lambda parameter: whole(parameter.shape))
    decoder.version = 1
    done = decode_all(decoder, [prompt_group(PROMPT, samples=4, max_new_tokens=8)])[0]
    assert gaps(done, load_merged(tmp_path / "adapter", dtype=torch.float32)).mean() < 1e-5
    assert gaps(done, odd_model(name)).mean() > 1e-3
