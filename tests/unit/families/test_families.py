"""The table of parameters agrees with the model, and a second family needs a second table and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llamarl.errors import ModelError
from llamarl.families.family import COLUMNS, ROWS, Family, ParameterSpec
from llamarl.families.parameters import FAMILIES, head_of, num_parameters, parameters, tied_name
from llamarl.layout.boxes import volume
from llamarl.layout.mesh import Mesh, box_on, parse_side
from llamarl.layout.model import model_plan, placement_of
from llamarl.layout.plan import ShardSpec, plan_transfer, reshardings_of
from llamarl.model.checkpoint import checked_spans, meta_model
from llamarl.model.tensor_io import write_tensors
from llamarl.model.transformer import RMSNorm
from llamarl.model_spec import SHAPES, ModelSpec
from llamarl.plan.terms import layer_products, recomputed_parameters, weight_bytes
from llamarl.weights.wire import WireFormat


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_is_the_models_own_parameters_in_its_order(name: str) -> None:
    found = [(key, tuple(parameter.shape)) for key, parameter in meta_model(SHAPES[name]).named_parameters()]
    assert found == [(key, parameter.shape) for key, parameter in parameters(SHAPES[name]).items()]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_kinds_are_what_the_modules_are(name: str) -> None:
    model = meta_model(SHAPES[name])
    for parameter in parameters(SHAPES[name]).values():
        module = model.get_submodule(parameter.module)
        assert isinstance(module, torch.nn.Embedding) == (parameter.kind == "embedding")
        assert isinstance(module, RMSNorm) == (parameter.kind in ("norm", "head_norm"))
        assert parameter.name.endswith(".bias") == (parameter.kind == "bias")
        assert (parameter.split is None) == isinstance(module, RMSNorm)


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = SHAPES["llama-3.2-1b"], SHAPES["llama-3.1-8b"]
    assert head_of(tied).name == "model.embed_tokens.weight" == tied_name("lm_head.weight")
    assert "lm_head.weight" not in parameters(tied)
    assert head_of(untied).name == "lm_head.weight"
    assert tied_name("model.norm.weight") == "model.norm.weight"


def before(spec: ModelSpec) -> Iterator[ParameterSpec]:
    yield ParameterSpec("wte", (spec.vocab_size, spec.hidden_size), "embedding", ROWS)


def layer(spec: ModelSpec) -> Iterator[ParameterSpec]:
    yield ParameterSpec("mix", (3 * spec.q_size, spec.hidden_size), "attention_in", ROWS, 3 * spec.head_dim)
    yield ParameterSpec("out", (spec.hidden_size, spec.q_size), "attention_out", COLUMNS, spec.head_dim)


def after(spec: ModelSpec) -> Iterator[ParameterSpec]:
    yield ParameterSpec("ln", (spec.hidden_size,), "norm")
    yield ParameterSpec("unembed", (spec.vocab_size, spec.hidden_size), "head", ROWS)


MADE_UP = Family(
    embedding="wte", head="unembed", before=before, layer=layer, after=after,
    layer_prefix="h.{index}.", derived=r"h\.\d+\.mask",
)  # fmt: skip
SPEC = ModelSpec(
    vocab_size=10, hidden_size=16, intermediate_size=8, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=4,
    max_positions=32, tied_head=True, family="made-up",
)  # fmt: skip


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "made-up", MADE_UP)


def test_a_second_family_is_named_counted_and_planned_from_its_table() -> None:
    assert list(parameters(SPEC)) == ["wte", "h.0.mix", "h.0.out", "h.1.mix", "h.1.out", "ln"]
    assert num_parameters(SPEC) == 160 + 2 * (768 + 256) + 16
    assert layer_products(SPEC, 2) == ((24, 16), (16, 8))
    assert recomputed_parameters(SPEC, "selective") == 0
    assert weight_bytes(SPEC, "fp8") == 2 * (768 + 256) + 2 * (160 + 16)


def test_a_second_family_is_laid_out_and_transferred_from_its_table() -> None:
    mix, mesh = parameters(SPEC)["h.1.mix"], Mesh((("tp", 2),))
    assert [box_on(rank, mix.shape, placement_of(mix), mesh) for rank in range(2)] == [
        ((0, 24), (0, 16)), ((24, 48), (0, 16)),
    ]  # fmt: skip
    plan = model_plan(SPEC, parse_side("", "fsdp=2", "fp32"), parse_side("", "tp=2", "bf16"))
    assert plan.total_bytes == plan.minimum_bytes == 2 * (num_parameters(SPEC) + 16), "each rank holds the norm"
    assert WireFormat.for_generator("fp8", SPEC, 2).segments["h.0.out"].width == 8
    held = ShardSpec(((0, 10), (0, 16)), 4)
    (move,) = plan_transfer(reshardings_of([{"wte": held}], [{"unembed": held}]), 1, 1)
    assert (move.source_name, move.target_name, volume(move.box)) == ("wte", "unembed", 160)


def test_a_second_familys_checkpoint_is_checked_against_its_table(tmp_path: Path) -> None:
    tensors = {name: torch.ones(parameter.shape) for name, parameter in parameters(SPEC).items()}
    file = tmp_path / "model.safetensors"
    write_tensors(file, {**tensors, "h.0.mask": torch.ones(1), "unembed": tensors["wte"]}, torch.float32)
    assert list(checked_spans(tmp_path, SPEC)) == list(tensors)
    write_tensors(file, {**tensors, "lm_head.weight": torch.ones(1)}, torch.float32)
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is not part of the model"):
        checked_spans(tmp_path, SPEC)
    write_tensors(file, {**tensors, "unembed": 2 * tensors["wte"]}, torch.float32)
    with pytest.raises(ModelError, match="unembed differs from wte"):
        checked_spans(tmp_path, SPEC)
