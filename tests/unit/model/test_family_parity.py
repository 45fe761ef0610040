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
from safetensors.torch import load_file, save_file
from torch import Tensor

from llamarl.errors import ModelError
from llamarl.families.experts import EXPERTS
from llamarl.families.parameters import FAMILIES, parameters
from llamarl.generate.parallel import TensorRank
from llamarl.model.checkpoint import all_of, load_model, save_model
from llamarl.model.hf_config import read_shape
from llamarl.model.transformer import Transformer, causal_attention

SEEDS = range(20)
PLAIN = {"attn_implementation": "eager"}


def is_dense(family: str) -> bool:
    return FAMILIES[family] not in EXPERTS


def lively_hf(hf: ModuleType, family: str, seed: int) -> Any:
    """A random small model of transformers, in plain attention, which knows all options."""
    config = getattr(hf, f"{CLASSES[family]}Config")(**odd_config(family, seed))
    how = PLAIN if is_dense(family) else PLAIN | {"experts_implementation": "eager"}
    theirs = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how).eval()
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
        assert_same_files(ours, tmp_path / f"theirs-{seed}", tmp_path / f"ours-{seed}")
        if seed < 3:
            how = PLAIN if is_dense(family) else PLAIN | {"experts_implementation": "eager"}
            back = hf.AutoModelForCausalLM.from_pretrained(tmp_path / f"ours-{seed}", pad_token_id=None, **how)
            assert type(back) is type(theirs)
            assert torch.equal(back(tokens_BT).logits, theirs(tokens_BT).logits), (family, seed)


def assert_same_files(ours: Transformer, theirs: Path, folder: Path) -> None:
    """What we save has the names and the numbers of what transformers saved."""
    save_model(ours, folder)
    saved, expected = (load_file(one / "model.safetensors") for one in (folder, theirs))
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name
    assert read_shape(folder) == ours.shape


@pytest.mark.parametrize("family", [one.name for one in EXPERTS])
def test_experts_are_read_in_both_layouts_of_files(hf: ModuleType, family: str, tmp_path: Path) -> None:
    """One tensor for each expert, and all of them in one: the same model, bit for bit."""
    theirs = lively_hf(hf, family, 1)
    theirs.save_pretrained(tmp_path / "original")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    one, other = (set(load_file(tmp_path / name / "model.safetensors")) for name in ("original", "stacked"))
    assert one != other
    ours = [dict(load_model(tmp_path / name).named_parameters()) for name in ("original", "stacked")]
    assert all(torch.equal(ours[0][name], ours[1][name]) for name in ours[0])


def test_a_missing_expert_is_named(hf: ModuleType, tmp_path: Path) -> None:
    lively_hf(hf, "olmoe", 1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.mlp\.experts\.1\.up_proj\.weight is missing"):
        load_model(tmp_path)


def test_a_part_of_each_expert_is_read(hf: ModuleType, tmp_path: Path) -> None:
    """As tensor ranks do."""
    lively_hf(hf, "olmoe", 1).save_pretrained(tmp_path)
    whole, half = load_model(tmp_path), TensorRank(1, 2)
    spec = parameters(whole.shape)["model.layers.0.mlp.experts.gate_up_proj"]
    part = load_model(tmp_path, box_of=lambda one: half.box(one) if one.is_expert else all_of(one))
    box = half.box(spec)
    expected = whole.get_parameter(spec.name)[tuple(slice(*dim) for dim in box)]
    assert expected.shape[2] < spec.shape[2]
    assert torch.equal(part.get_parameter(spec.name), expected)
