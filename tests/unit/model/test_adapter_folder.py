"""Folders of adapters: PEFT and transformers read ours, we read theirs, and what we cannot compute is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lora import LORA, random_adapters, save_both
from helpers.models import SHAPE
from helpers.odd_models import EXPERTS
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from llamarl.config import LoraConfig, model_folder
from llamarl.errors import ConfigError, InputError, ModelError
from llamarl.families.adapters import adapted_layers, adapter_names
from llamarl.model.adapter_folder import (
    FINGERPRINT,
    base_of,
    check_same,
    load_merged,
    merge,
    open_adapter,
    save_adapter,
)
from llamarl.model.checkpoint import load_model
from llamarl.model.folders import no_config
from llamarl.model.transformer import Transformer, causal_attention

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@torch.no_grad()
def logprobs_of(model: Transformer) -> Tensor:
    hidden = model(TOKENS, torch.arange(TOKENS.shape[1]).expand_as(TOKENS), causal_attention)
    return torch.log_softmax(model.logits(hidden), -1)


def edit(folder: Path, **keys: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = save_both(tmp_path)
    found = open_adapter(folder, SHAPE)
    assert (found.lora, base_of(folder)) == (LORA, tmp_path / "model")
    memory = {name: torch.empty_like(one) for name, one in random_adapters().items()}
    found.fill(memory)
    assert all(torch.equal(memory[name], one) for name, one in random_adapters().items())


@pytest.mark.parametrize("targets", ["all", "attention", ("q_proj", "down_proj")])
def test_peft_loads_it_and_transformers_reproduces_the_logprobs(targets: str | tuple[str, ...], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    folder = save_both(tmp_path, LoraConfig(rank=3, alpha=6.0, targets=targets))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder)
    assert not [name for name, one in theirs.named_parameters() if "lora" in name and not one.abs().sum() > 0]
    with torch.no_grad():
        expected = torch.log_softmax(theirs(TOKENS).logits, -1)
    ours = logprobs_of(load_merged(folder, dtype=torch.float32))
    assert torch.allclose(ours, expected, atol=1e-4)
    assert (ours - logprobs_of(load_model(tmp_path / "model"))).abs().mean() > 1e-2
    with theirs.disable_adapter(), torch.no_grad():
        off = torch.log_softmax(theirs(TOKENS).logits, -1)
    assert torch.allclose(off, logprobs_of(load_model(tmp_path / "model")), atol=1e-4)


@pytest.mark.parametrize("targets", ["all", ("experts",), ("experts", "q_proj")])
@pytest.mark.parametrize("name", list(EXPERTS))
def test_peft_loads_adapters_of_experts(name: str, targets: str | tuple[str, ...], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    shape = replace(EXPERTS[name], dense_layers=())  # beside experts, PEFT takes dense MLPs for experts of old files
    folder = save_both(tmp_path, LoraConfig(rank=3, alpha=6.0, targets=targets), shape)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder)
    assert not [key for key, one in theirs.named_parameters() if "lora" in key and not one.abs().sum() > 0]
    with torch.no_grad():
        expected = torch.log_softmax(theirs(TOKENS).logits, -1)
    ours = logprobs_of(load_merged(folder, dtype=torch.float32))
    assert torch.allclose(ours, expected, atol=1e-4)
    assert (ours - logprobs_of(load_model(tmp_path / "model"))).abs().mean() > 1e-2
    theirs.save_pretrained(tmp_path / "theirs")
    again = logprobs_of(load_merged(tmp_path / "theirs", dtype=torch.float32))
    assert torch.allclose(again, expected, atol=1e-4), "what PEFT writes is read"


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_writes_is_read(rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    save_both(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        init_lora_weights=False,
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )
    theirs: Any = peft.get_peft_model(base, settings)
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = torch.log_softmax(theirs(TOKENS).logits, -1)
    assert torch.allclose(logprobs_of(load_merged(tmp_path / "theirs", dtype=torch.float32)), expected, atol=1e-4)


def test_merge_writes_a_whole_folder(tmp_path: Path) -> None:
    folder = save_both(tmp_path)
    merge(folder, tmp_path / "whole")
    whole = load_model(tmp_path / "whole")
    assert torch.equal(logprobs_of(whole), logprobs_of(load_merged(folder, dtype=torch.float32)))
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        merge(tmp_path / "whole", tmp_path / "again")
    with pytest.raises(ModelError, match="already exists"):
        merge(folder, tmp_path / "whole")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merged_weights_are_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """The base has numbers that the narrow type has not, so a base that is rounded before it is merged into shows."""
    folder = save_both(tmp_path)
    base, adapters = load_model(tmp_path / "model"), random_adapters()
    assert any((one != one.to(dtype)).any() for one in base.parameters())
    merged = dict(load_merged(folder, dtype=dtype).named_parameters())
    merge(folder, tmp_path / "whole", dtype=str(dtype).removeprefix("torch."))
    written = load_file(tmp_path / "whole" / "model.safetensors")
    for weight in adapted_layers(SHAPE, LORA):
        a, b = (adapters[name].double() for name in adapter_names(weight))
        exact = base.get_parameter(weight.name).double() + LORA.scale * b @ a
        for found in (merged[weight.name].detach(), written[weight.name]):
            assert found.dtype == dtype
            # half a unit in the last place, and what fp32 itself rounds, which decides only between equally near numbers
            half = torch.finfo(dtype).eps / 2 * 2.0 ** exact.abs().log2().floor()
            assert ((found.double() - exact).abs() <= half + 1e-6).all()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"peft_type": "LOHA"}, "'peft_type' is 'LOHA'; only LORA is supported"),
        ({"use_dora": True}, "'use_dora': true is not supported"),
        ({"bias": "all"}, "'bias': \"all\" is not supported"),
        ({"rank_pattern": {"q_proj": 9}}, "'rank_pattern'.* is not supported"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save'.* is not supported"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights': \"pissa\" is not supported"),
        ({"a_key_of_next_year": 3}, "'a_key_of_next_year': 3 is not supported"),
        ({"r": 0}, "'r' and 'lora_alpha' must be numbers above 0"),
        ({"r": 4}, r"has shape \[3, 32\]; this base needs \[4, 32\]"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(keys: dict[str, object], reason: str, tmp_path: Path) -> None:
    folder = save_both(tmp_path)
    edit(folder, **keys)
    with pytest.raises(ModelError, match=reason):
        open_adapter(folder, SHAPE)


def test_one_matrix_too_few_or_too_many_is_noticed(tmp_path: Path) -> None:
    folder = save_both(tmp_path)
    path, name = folder / "adapter_model.safetensors", "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors = load_file(path)
    missing = {key: one for key, one in tensors.items() if key != name}
    save_file(missing, path)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.lora_B\.weight is missing"):
        open_adapter(folder, SHAPE)
    save_file({**tensors, "base_model.model.lm_head.lora_A.weight": tensors[name].clone()}, path)
    with pytest.raises(ModelError, match=r"lm_head\.lora_A\.weight belongs to no layer"):
        open_adapter(folder, SHAPE)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"layers\.1\..* belongs to no layer"):
        open_adapter(folder, replace(SHAPE, num_layers=1))


def test_a_base_that_is_not_here_is_named(tmp_path: Path) -> None:
    folder = save_both(tmp_path)
    edit(folder, base_model_name_or_path="Qwen/Qwen3-8B")
    with pytest.raises(ModelError, match=r"base model 'Qwen/Qwen3-8B', which is no model folder here; put it there"):
        load_merged(folder, dtype=torch.float32)
    edit(folder, base_model_name_or_path="../model")
    assert base_of(folder).samefile(tmp_path / "model")
    edit(folder, base_model_name_or_path=None)
    with pytest.raises(ModelError, match="names no base model"):
        base_of(folder)
    assert "llamarl merge" in no_config(folder) and "model.adapter" in no_config(folder)


def test_a_base_of_the_hub_is_named_by_its_name_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    commit = "0123456789" * 4
    base = model_folder(f"org/base@{commit}")
    save_both(tmp_path)
    base.parent.mkdir(parents=True)
    (tmp_path / "model").rename(base)
    save_adapter(random_adapters(), LORA, SHAPE, tmp_path / "named", base)
    config = json.loads((tmp_path / "named" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", commit)
    assert base_of(tmp_path / "named") == base
    assert str(tmp_path) not in (tmp_path / "named" / "adapter_config.json").read_text()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(ModelError, match=rf"base model 'org/base@{commit}', which is no model folder here"):
        base_of(tmp_path / "named")


def test_settings_must_be_those_of_the_folder(tmp_path: Path) -> None:
    found = open_adapter(save_both(tmp_path), SHAPE)
    check_same(LORA, found)
    check_same(
        replace(LORA, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")), found
    )
    with pytest.raises(InputError, match=r"set model\.lora\.rank=3 model\.lora\.alpha=6 model\.lora\.targets=all"):
        check_same(replace(LORA, alpha=3.0), found)


def test_adapters_are_not_put_on_a_base_that_has_changed(tmp_path: Path) -> None:
    adapter = save_both(tmp_path)
    assert load_merged(adapter, dtype=torch.float32)
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="were trained on another base"):
        load_merged(adapter, dtype=torch.float32)
    (adapter / FINGERPRINT).unlink()
    assert load_merged(adapter, dtype=torch.float32), "folders of PEFT itself say nothing of their base"
