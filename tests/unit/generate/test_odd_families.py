"""Windows, norms, biases, softcaps and multipliers in the generator: it samples what one pass over all tokens says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.decoding import decode_all
from helpers.groups import prompt_group
from helpers.lora import put_adapters, random_adapters
from helpers.odd_models import ALL, EXPERTS, ODD, odd_model
from msgspec.structs import replace
from torch import Tensor

from llamarl.config import LoraConfig
from llamarl.errors import ConfigError
from llamarl.generate.attention import ExtendAttention, PrefillAttention
from llamarl.generate.decoder import AS_THE_MODEL, ContinuousDecoder, Limits, Precision
from llamarl.generate.kv_cache import PagedCache
from llamarl.layout.boxes import whole
from llamarl.model.adapter_folder import load_merged, save_adapter
from llamarl.model.checkpoint import save_model
from llamarl.model.lora import merge_adapters, serve_adapters
from llamarl.model.transformer import Transformer, causal_attention
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


@pytest.mark.parametrize("name", ODD)
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


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_quantized_experts_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match="models with experts are served in their own precision"):
        sample(odd_model("olmoe"), Precision(weights=weights))  # type: ignore[arg-type]


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
