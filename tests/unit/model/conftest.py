"""Small random models, ours and transformers', for the tests of this folder."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from llamarl.generate.attention import DecodeAttention, PrefillAttention
from llamarl.generate.kv_cache import PagedCache
from llamarl.model.checkpoint import random_model
from llamarl.model.rope import rope_up_to
from llamarl.model.transformer import Transformer
from llamarl.model_spec import ModelSpec

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
ROOT = Path(__file__).parents[3]

# (step, logits_BV) -> the tokens [B] to go on with
Choose = Callable[[int, Tensor], Tensor]
CachedLogits = Callable[[Transformer, list[list[int]], Choose, int], Tensor]
_Model = TypeVar("_Model", bound=torch.nn.Module)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, and the test machine has few."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def hf() -> ModuleType:
    """transformers, quiet. Imported by name: its own types are not ours to check."""
    module = importlib.import_module("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


@pytest.fixture
def tiny() -> ModelSpec:
    """Untied, with grouped heads; small enough to save and load in a blink."""
    return ModelSpec(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=128,
    )


@pytest.fixture
def tiny_model(tiny: ModelSpec) -> Transformer:
    return lively(random_model(tiny, seed=3), seed=3)


@pytest.fixture(params=[(family, seed) for family in FAMILIES for seed in range(3)], ids=lambda p: f"{p[0]}-{p[1]}")
def hf_model(request: pytest.FixtureRequest, hf: ModuleType) -> Any:
    """A random small transformers model of each family, three times, with weights far from their initial symmetry."""
    family, seed = request.param
    config = hf_config(hf, family, seed)
    torch.manual_seed(seed)
    return lively(hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed).eval()


@pytest.fixture(scope="session")
def hf_reward_model(hf: ModuleType) -> Callable[[str], Any]:
    """A random small model of a family with one score instead of a head."""

    def make(family: str) -> Any:
        config = hf_config(hf, family, 1)
        config.num_labels, config.pad_token_id = 1, 2
        torch.manual_seed(1)
        return lively(hf.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32), 1).eval()

    return make


def hf_config(hf: ModuleType, family: str, seed: int) -> Any:
    pick = random.Random(f"{family} {seed}")
    kv_heads, group = pick.choice((1, 2, 3)), pick.choice((1, 2, 3))
    heads = kv_heads * group
    head_dim = pick.choice((8, 16))
    hidden = heads * (head_dim if family in ("llama", "qwen2") else pick.choice((8, 12)))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": pick.choice((10_000.0, 500_000.0))}
    if family == "llama3":
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 64}
    sizes: dict[str, Any] = {
        "vocab_size": pick.randrange(50, 200),
        "hidden_size": hidden,
        "intermediate_size": pick.randrange(24, 64),
        "num_hidden_layers": pick.randrange(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": pick.choice((1e-5, 1e-6)),
        "tie_word_embeddings": seed % 2 == 0,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family != "qwen2":
        sizes["head_dim"] = head_dim
    if family == "mistral":
        sizes["sliding_window"] = None
    name = {"llama": "Llama", "llama3": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    return getattr(hf, f"{name}Config")(**sizes)


def lively(model: _Model, seed: int) -> _Model:
    """Every parameter drawn anew: biases and norms at their neutral values would hide a missing one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if parameter.dim() > 1 else 0.2
            parameter.normal_(1.0 if "norm" in name else 0.0, spread, generator=generator)
    return model


@pytest.fixture
def cached_logits() -> CachedLogits:
    """Prompts through prefill, the rest token by token through the KV cache, each row from where its prompt ends."""
    return _cached_logits


@torch.no_grad()
def _cached_logits(model: Transformer, prompts: list[list[int]], choose: Choose, count: int) -> Tensor:
    longest = max(len(prompt) for prompt in prompts)
    page_tokens, width = 4, -(-(longest + count) // 4)
    cache = PagedCache(model.shape, len(prompts) * width, page_tokens, dtype=torch.float32, device="cpu")
    table_SP = 1 + torch.randperm(len(prompts) * width).view(len(prompts), width)
    padded_BT, pages_BT = torch.zeros(2, len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded_BT[row, : len(prompt)] = torch.tensor(prompt)
        pages_BT[row, : len(prompt)] = table_SP[row].repeat_interleave(page_tokens)[: len(prompt)]
    hidden_BTC = model(padded_BT, torch.arange(longest).expand_as(padded_BT), PrefillAttention(cache, pages_BT))
    positions_B, slots_B = torch.tensor([len(prompt) for prompt in prompts]), torch.arange(len(prompts))
    logits_BV = model.logits(hidden_BTC[slots_B, positions_B - 1])
    steps, rope = [logits_BV], rope_up_to(model.shape, longest + count, "cpu")
    for step in range(count - 1):
        attend = DecodeAttention(cache, table_SP, slots_B, positions_B, rope)
        hidden_B1C = model(choose(step, steps[-1])[:, None], positions_B[:, None], attend)
        steps.append(model.logits(hidden_B1C[:, 0]))
        positions_B = positions_B + 1
    return torch.stack(steps, dim=1)


@pytest.fixture
def smollm2() -> Path:
    """The folder that `examples/models/smollm2.py` makes; its tests run where it is present."""
    folder = Path(os.environ.get("LLAMARL_SMOLLM2", ROOT / "models" / "smollm2"))
    if not folder.is_dir():
        pytest.skip("no SmolLM2 folder; run: python examples/models/smollm2.py models/smollm2")
    return folder
