"""Folders in and out: nothing lost, nothing read twice, nothing half written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from llamarl.errors import ModelError
from llamarl.families.family import ParameterSpec
from llamarl.families.parameters import num_parameters, parameter_shapes, parameters
from llamarl.layout.boxes import Box, relative, whole
from llamarl.model.checkpoint import BoxOf, load_model, meta_model, open_checkpoint, random_model, save_model
from llamarl.model.transformer import Transformer
from llamarl.model_spec import SHAPES, ModelSpec


def assert_same(found: Transformer, expected: Transformer) -> None:
    for name, parameter in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 5000])
def test_what_is_saved_loads_bit_for_bit(
    tiny_model: Transformer, tmp_path: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    model = tiny_model.to(dtype)
    save_model(model, tmp_path / "m", max_shard_bytes=max_shard_bytes)
    assert_same(load_model(tmp_path / "m", dtype=dtype), model)


def test_the_dtype_changes_on_the_way_as_by_to(tiny_model: Transformer, tmp_path: Path) -> None:
    save_model(tiny_model, tmp_path / "wide")
    assert_same(load_model(tmp_path / "wide", dtype=torch.bfloat16), tiny_model.to(torch.bfloat16))
    save_model(load_model(tmp_path / "wide"), tmp_path / "narrow", dtype=torch.bfloat16)
    assert (tmp_path / "narrow" / "model.safetensors").stat().st_size < 0.6 * (
        tmp_path / "wide" / "model.safetensors"
    ).stat().st_size
    assert_same(load_model(tmp_path / "narrow", dtype=torch.bfloat16), tiny_model)


def test_files_keep_to_the_limit_and_the_index_adds_up(tiny_model: Transformer, tmp_path: Path) -> None:
    limit = 12_000
    save_model(tiny_model, tmp_path / "m", max_shard_bytes=limit)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = {file: load_file(tmp_path / "m" / file) for file in set(index["weight_map"].values())}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    assert len(files) > 1
    assert max(sizes) <= limit
    assert sum(sizes) == index["metadata"]["total_size"]
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]


def columns(parameter: ParameterSpec) -> Box:
    """The second of two ranks: half the columns of what a row-parallel layer splits, half the rows of the rest."""
    name, shape = parameter.name, parameter.shape
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return (0, shape[0]), (shape[1] // 2, shape[1])
    return (shape[0] // 2, shape[0]), *((0, size) for size in shape[1:])


def nothing(parameter: ParameterSpec) -> Box:
    """A rank beyond the last row, as uneven sharding leaves it."""
    return (parameter.shape[0], parameter.shape[0]), *((0, size) for size in parameter.shape[1:])


@pytest.mark.parametrize("box_of", [columns, nothing])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_is_that_part_of_the_whole(
    tiny_model: Transformer, tmp_path: Path, box_of: BoxOf, dtype: torch.dtype
) -> None:
    save_model(tiny_model, tmp_path / "m")
    part = load_model(tmp_path / "m", box_of=box_of, dtype=dtype)
    for name, parameter in tiny_model.named_parameters():
        box = box_of(parameters(tiny_model.shape)[name])
        expected = parameter[relative(box, whole(parameter.shape))].to(dtype)
        assert torch.equal(part.get_parameter(name), expected), name


def test_only_the_bytes_of_a_shard_are_read(
    tiny_model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_model, tmp_path / "m")
    real, num_bytes = os.preadv, 0

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal num_bytes
        got = real(fd, buffers, offset)
        num_bytes += got
        return got

    monkeypatch.setattr(os, "preadv", counting)
    part = load_model(tmp_path / "m", box_of=columns)
    assert num_bytes == sum(parameter.nbytes for parameter in part.parameters())


def test_parameters_can_be_filled_in_memory_that_others_own(tiny_model: Transformer, tmp_path: Path) -> None:
    save_model(tiny_model, tmp_path / "m")
    name = "model.layers.1.mlp.up_proj.weight"
    memory = torch.full((40, 24), torch.nan)
    open_checkpoint(tmp_path / "m").fill({name: memory})
    assert torch.equal(memory, tiny_model.get_parameter(name))


def rewrite(folder: Path, change: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | change, path, metadata={"format": "pt"})


def test_a_tied_copy_of_the_head_must_be_a_copy(tiny: ModelSpec, tmp_path: Path) -> None:
    model = random_model(replace(tiny, tied_head=True), seed=0)
    save_model(model, tmp_path / "m")
    embedding = model.model.embed_tokens.weight.detach().clone()
    rewrite(tmp_path / "m", {"lm_head.weight": embedding})
    loaded = load_model(tmp_path / "m")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    embedding[-1, -1] += 1
    rewrite(tmp_path / "m", {"lm_head.weight": embedding})
    with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
        load_model(tmp_path / "m")


def test_frequencies_of_old_llama_folders_are_let_pass_and_other_extras_named(
    tiny_model: Transformer, tmp_path: Path
) -> None:
    save_model(tiny_model, tmp_path / "m")
    rewrite(tmp_path / "m", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_same(load_model(tmp_path / "m"), tiny_model)
    rewrite(tmp_path / "m", {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    with pytest.raises(ModelError, match=r"q_proj\.bias is not part"):
        load_model(tmp_path / "m")


def test_what_belongs_to_the_model_is_carried_over(hf: ModuleType, tiny_model: Transformer, tmp_path: Path) -> None:
    save_model(tiny_model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text()) | {"eos_token_id": 7, "dtype": "float32"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (tmp_path / "a" / name).write_text("{}")
    (tmp_path / "a" / "optimizer.bin").write_text("not part of a model")
    save_model(tiny_model, tmp_path / "b", carry_from=tmp_path / "a", dtype=torch.bfloat16)
    carried = {path.name for path in (tmp_path / "b").iterdir()}
    assert carried == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    back = hf.AutoConfig.from_pretrained(tmp_path / "b")
    assert (back.eos_token_id, back.dtype) == (7, torch.bfloat16)


def test_an_existing_folder_is_never_written_over(tiny_model: Transformer, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="already exists"):
        save_model(tiny_model, tmp_path / "m")
    assert [path.name for path in tmp_path.rglob("*")] == ["m", "notes.txt"]


def test_a_save_that_fails_leaves_nothing(
    tiny_model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llamarl.model.checkpoint.write_tensors", full)
    with pytest.raises(ModelError, match="No space left on device"):
        save_model(tiny_model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_shapes_are_those_of_the_model(name: str) -> None:
    model = meta_model(SHAPES[name])
    assert parameter_shapes(SHAPES[name]) == {key: tuple(p.shape) for key, p in model.named_parameters()}
    assert num_parameters(SHAPES[name]) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_named_shapes_have_their_published_parameter_counts(name: str, expected: int) -> None:
    assert num_parameters(SHAPES[name]) == expected


def test_a_random_model_follows_from_its_seed(tiny: ModelSpec) -> None:
    assert_same(random_model(tiny, seed=5), random_model(tiny, seed=5))
    other = random_model(tiny, seed=6)
    assert not torch.equal(random_model(tiny, seed=5).lm_head.weight, other.lm_head.weight)
