"""Who asks for narrow weights to be faster, where they are not, is told so in one line."""

from __future__ import annotations

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
