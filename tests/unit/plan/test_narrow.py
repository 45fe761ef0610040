"""Who asks for narrow weights to be faster, where they are not, is told so in one line."""

from __future__ import annotations

import json

import pytest
from helpers.cli import llamarl

from llamarl.model_spec import shape_named
from llamarl.plan.narrow import narrow_advice

PLAN = ["plan", "--gpus", "2", "--gpu", "h200", "--prompt", "120", "--answer", "fixed:256", "--groups", "8"]


@pytest.mark.parametrize(
    ("model", "quantize", "told"),
    [
        ("qwen2.5-1.5b", "fp8", "do not pay below 8B, and this model has 1.5B weights"),
        ("llama-3.1-8b", "fp8", ""),
        ("llama-3.1-8b", "int8", "save memory, not time"),
        ("qwen2.5-1.5b", "none", ""),
        ("qwen2.5-1.5b", "", ""),
    ],
)
def test_narrow_weights_that_do_not_pay(model: str, quantize: str, told: str) -> None:
    found = narrow_advice(shape_named(model), quantize)
    assert told in found and bool(told) == bool(found)
    assert "\n" not in found


@pytest.mark.parametrize(("precision", "told"), [("fp8", 1), ("bf16", 0)])
def test_a_plan_says_so(precision: str, told: int) -> None:
    done = llamarl(*PLAN, "--model", "qwen2.5-1.5b", "--precision", precision)
    assert done.code == 0, done.err
    assert done.out.count("fp8 generators do not pay below 8B") == told


SHORT = ["plan", "--gpus", "4", "--gpu", "h200", "--prompt", "128", "--answer", "fixed:512", "--groups", "16"]


@pytest.mark.parametrize(
    ("model", "precision", "told"),
    [
        ("llama-3.1-8b", [], True),
        ("llama-3.1-8b", ["--precision", "bf16"], False),  # asked for
        ("llama-3.1-8b", ["--lora", "8"], False),  # generators compute with the base's own weights
        ("qwen2.5-1.5b", [], False),  # fp8 does not pay
    ],
)
def test_a_plan_in_bf16_tells_where_fp8_would_be_faster(model: str, precision: list[str], told: bool) -> None:
    """As fast as the plan that is then asked for."""
    shown = llamarl(*SHORT, "--model", model, *precision)
    found = json.loads(llamarl(*SHORT, "--model", model, *precision, "--json").out)
    assert bool(found["narrow"]) == told
    assert ("generators in fp8 about" in shown.out) == told
    if told:
        asked = json.loads(llamarl(*SHORT, "--model", model, "--precision", "fp8", "--json").out)
        assert found["narrow"] == asked["async"]
        assert found["narrow"]["step_s"] < 0.95 * found["async"]["step_s"]
        assert f"fp8 about {asked['async']['step_s']:.2f} s an update" in shown.out
