"""What a job with experts is refused before it starts."""

from __future__ import annotations

import pytest
import torch
from helpers.experts import SHAPE
from msgspec.structs import replace

from llamarl.builders.weights import wire_precision
from llamarl.config.file import load_config
from llamarl.errors import ConfigError
from llamarl.jobs import model_check
from llamarl.jobs.model_check import check_model
from llamarl.layout.model import check_shared


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.base=fp8", "model.lora.rank=4", "model.lora.targets=attention"], "model.base: fp8, but experts"),
        (["trainer.dtype=float16"], "trainer.dtype: float16, but experts compute in bfloat16"),
        (["generator.tensor=3"], "3 ranks cannot share"),
        (
            ["generator.tensor=6", "generator.expert=3"],
            "generator.tensor: 6 ranks cannot share the model's num_kv_heads=2",
        ),
    ],
)
def test_precisions_and_adapters_that_experts_do_not_have_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(load_config(None, ["model.path=tiny-moe", *settings]))
    assert message in str(caught.value)


def test_adapters_of_experts_on_a_gpu_need_a_rank_that_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "device_of", lambda key, name: torch.device("cuda"))
    job = ["model.path=tiny-moe", "trainer.dtype=bfloat16", "generator.dtype=bfloat16"]
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: 4, .* multiple of 8; .* model\.lora\.targets=attention"):
        check_model(load_config(None, [*job, "model.lora.rank=4"]))
    check_model(load_config(None, [*job, "model.lora.rank=4", "model.lora.targets=attention"]))
    check_model(load_config(None, [*job, "model.lora.rank=8"]))


def test_weights_of_quantized_experts_travel_wide() -> None:
    narrow = ["generator.quantize=fp8", "generator.dtype=bfloat16"]
    assert wire_precision(load_config(None, narrow)) == "fp8"
    assert wire_precision(load_config(None, ["model.path=tiny-moe", *narrow])) == "bf16"


def test_a_dense_model_has_nothing_to_balance() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.balance_loss: this model has no experts"):
        check_model(load_config(None, ["trainer.balance_loss=0.01"]))


def test_the_shipped_model_with_experts_is_accepted() -> None:
    for targets in ("all", "attention", "mlp", "[q_proj,experts]"):
        tokenizer, notes = check_model(
            load_config(None, ["model.path=tiny-moe", "model.lora.rank=4", f"model.lora.targets={targets}"])
        )
        assert tokenizer.vocab_size == 17
        assert not notes


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_ranks_of_experts_that_cannot_be_are_refused(role: str) -> None:
    """A number that does not divide the tensor ranks, a model without experts, experts that are not divisible."""
    for more in ([f"{role}.tensor=2", f"{role}.expert=4"], [f"{role}.expert=2", f"{role}.tensor=1"]):
        with pytest.raises(ConfigError, match=rf"{role}.expert: \d must divide {role}.tensor=\d"):
            load_config(None, ["model.path=tiny-moe", *more])
    with pytest.raises(ConfigError, match=rf"{role}.expert: 2, but tiny has no experts; set it to 1"):
        check_model(load_config(None, ["model.path=tiny", f"{role}.tensor=2", f"{role}.expert=2"]))
    with pytest.raises(ConfigError, match=rf"{role}.expert: 2 ranks cannot share the model's experts=5 evenly"):
        check_shared(replace(SHAPE, experts=5), 2, 2, role)
    check_shared(replace(SHAPE, expert_size=15), 2, 2, role)  # no expert is cut
