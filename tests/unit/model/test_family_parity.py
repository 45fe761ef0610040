"""Every family computes what transformers computes, in twenty odd configurations; folders cross both ways bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.family_configs import CLASSES, LENGTH, odd_config
from safetensors.torch import load_file
from torch import Tensor

from llamarl.families.parameters import FAMILIES
from llamarl.model.checkpoint import load_model, save_model
from llamarl.model.hf_config import read_shape
from llamarl.model.transformer import Transformer, causal_attention

SEEDS = range(20)


def lively_hf(hf: ModuleType, family: str, seed: int) -> Any:
    """A random small model of transformers, in plain attention, which knows all options."""
    config = getattr(hf, f"{CLASSES[family]}Config")(**odd_config(family, seed))
    theirs = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            neutral = 0.0 if family.startswith("gemma") else 1.0
            spread = 0.1 if parameter.dim() > 1 else 0.2
            parameter.normal_(neutral if "norm" in name else 0.0, spread, generator=generator)
    return theirs


def logits_of(model: Transformer, tokens_BT: Tensor) -> Tensor:
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    return model.logits(model(tokens_BT, positions_BT, causal_attention))


def next_of(tokens_BT: Tensor, step: int, logits_BV: Tensor) -> Tensor:
    return tokens_BT[:, step]


def logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), -1)


@pytest.mark.parametrize("family", CLASSES)
@torch.no_grad()
def test_logprobs_equal_those_of_transformers(
    hf: ModuleType, family: str, tmp_path: Path, cached_logits: Callable[..., Tensor]
) -> None:
    """Of a whole pass, and of one that goes through the KV cache token by token; and both folders hold the same numbers."""
    assert family in FAMILIES
    for seed in SEEDS:
        theirs = lively_hf(hf, family, seed)
        theirs.save_pretrained(tmp_path / f"theirs-{seed}")
        ours = load_model(tmp_path / f"theirs-{seed}")
        generator = torch.Generator().manual_seed(seed)
        tokens_BT = torch.randint(0, ours.shape.vocab_size, (2, LENGTH), generator=generator)
        expected = logprobs(theirs(tokens_BT).logits)
        assert expected.std() > 0.03, "log-probs that are all alike would pass whatever we compute"
        found = logprobs(logits_of(ours, tokens_BT))
        assert (found - expected).abs().max() < 1e-5, (family, seed)
        if seed % 2:
            cached = cached_logits(ours, tokens_BT[:, :5].tolist(), partial(next_of, tokens_BT[:, 5:]), LENGTH - 4)
            assert (logprobs(cached) - expected[:, 4:]).abs().max() < 1e-5, (family, seed)
        assert_same_files(ours, theirs, tmp_path / f"ours-{seed}")
        if seed < 3:
            back = hf.AutoModelForCausalLM.from_pretrained(
                tmp_path / f"ours-{seed}", attn_implementation="eager", pad_token_id=None
            )
            assert type(back) is type(theirs)
            assert torch.equal(back(tokens_BT).logits, theirs(tokens_BT).logits), (family, seed)


def assert_same_files(ours: Transformer, theirs: Any, folder: Path) -> None:
    """What we save has the names and the numbers of transformers."""
    save_model(ours, folder)
    saved, expected = load_file(folder / "model.safetensors"), dict(theirs.named_parameters())
    assert saved.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(saved[name], parameter), name
    assert read_shape(folder) == ours.shape
