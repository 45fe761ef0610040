"""The table of adapters: which layers have them, and how ranks share them."""

from __future__ import annotations

import pytest
from helpers.models import SHAPE

from llamarl.config import LoraConfig
from llamarl.errors import ConfigError
from llamarl.families.adapters import adapter_parameters, num_adapter_parameters, trained_parameters
from llamarl.families.family import COLUMNS, ROWS
from llamarl.families.parameters import parameters
from llamarl.model_spec import SHAPES


def layers(targets: str | tuple[str, ...]) -> set[str]:
    return {name.split(".")[-3] for name in adapter_parameters(SHAPE, LoraConfig(rank=2, targets=targets))}


def test_targets_name_layers() -> None:
    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert (layers("attention"), layers("mlp"), layers("all")) == (attention, mlp, attention | mlp)
    assert layers(("q_proj", "up_proj")) == {"q_proj", "up_proj"}


def test_no_adapters_means_that_everything_is_trained() -> None:
    assert trained_parameters(SHAPE, LoraConfig()) == parameters(SHAPE)
    assert not adapter_parameters(SHAPE, LoraConfig())


def test_adapters_are_cut_where_their_layer_is_cut() -> None:
    """Split outputs: A whole, B by rows. Split inputs: A by columns, B whole. What is whole has a gradient to be summed."""
    table = adapter_parameters(SHAPE, LoraConfig(rank=2))
    for name, one in table.items():
        split_inputs, is_a = any(layer in name for layer in ("o_proj", "down_proj")), "lora_A" in name
        assert one.split == ((COLUMNS if is_a else None) if split_inputs else (None if is_a else ROWS))
        assert one.has_partial_gradient == (one.split is None)
    assert table["model.layers.0.mlp.up_proj.lora_A.weight"].shape == (2, SHAPE.hidden_size)
    assert table["model.layers.0.mlp.up_proj.lora_B.weight"].shape == (SHAPE.intermediate_size, 2)


def test_sizes_are_those_that_the_field_knows() -> None:
    """PEFT reports 83,886,080 trainable parameters for Llama 3.1 8B with rank 32 on all linear layers."""
    assert num_adapter_parameters(SHAPES["llama-3.1-8b"], LoraConfig(rank=32)) == 83_886_080


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        ("some", r"model\.lora\.targets: expected all, attention, mlp or a list of layers, got 'some'"),
        ((), r"model\.lora\.targets: the list must name at least one layer"),
        (("q_proj", "q_proj"), r"model\.lora\.targets: .* each layer once"),
        (("q_proj", "lm_head"), r"model\.lora\.targets: no layer is named 'lm_head'; known: q_proj, "),
    ],
)
def test_unknown_layers_are_refused(targets: str | tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        layers(targets)
