"""Plans of models with experts: memory by all parameters, operations by the active ones, bytes by the used ones."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamarl.errors import InputError
from llamarl.families.parameters import active_block_parameters, block_parameters, matrix_parameters, num_parameters
from llamarl.model_spec import SHAPES
from llamarl.plan.advice import _changes
from llamarl.plan.gpus import GPUS
from llamarl.plan.lengths import Lengths
from llamarl.plan.terms import decode_terms, recomputed_parameters, train_terms, training_state_bytes, weight_bytes
from llamarl.plan.workload import Question, Workload
from llamarl.train.speed import training_flops

OLMOE, QWEN = SHAPES["olmoe-1b-7b"], SHAPES["qwen3-30b-a3b"]
H200 = GPUS["h200"]


def test_totals_and_active_parameters_are_those_of_the_models_cards() -> None:
    assert num_parameters(OLMOE) == pytest.approx(6.92e9, rel=0.001)
    assert matrix_parameters(OLMOE) + OLMOE.vocab_size * OLMOE.hidden_size == pytest.approx(1.28e9, rel=0.01)
    assert num_parameters(QWEN) == pytest.approx(30.5e9, rel=0.002)
    assert matrix_parameters(QWEN) + QWEN.vocab_size * QWEN.hidden_size == pytest.approx(3.35e9, rel=0.01)
    assert matrix_parameters(SHAPES["llama-3.1-8b"]) == block_parameters(SHAPES["llama-3.1-8b"]) + 128_256 * 4096


def test_memory_counts_all_experts_and_operations_a_few() -> None:
    assert weight_bytes(OLMOE, "bf16") == 2 * num_parameters(OLMOE)
    assert training_state_bytes(OLMOE, 1, 1) == 16 * num_parameters(OLMOE)
    assert training_flops(OLMOE, [1]) == pytest.approx(6 * matrix_parameters(OLMOE), rel=0.001)
    assert recomputed_parameters(OLMOE, "full") == active_block_parameters(OLMOE)
    terms = train_terms(OLMOE, H200, "bf16", tokens=16_384, answer_tokens=16_384, squares=0, passes=1)
    assert terms["products"] == pytest.approx(6 * 16_384 * matrix_parameters(OLMOE) / H200.flops("bf16"))


def test_a_decode_step_reads_the_experts_that_its_tokens_use() -> None:
    assert OLMOE.used_experts(1) == pytest.approx(8)
    assert OLMOE.used_experts(256) == pytest.approx(64)
    one, many = (decode_terms(OLMOE, H200, "bf16", rows, 0)["products"] for rows in (1, 256))
    assert one == pytest.approx(2 * matrix_parameters(OLMOE) / H200.bytes_per_s, rel=0.02)
    assert many == pytest.approx(2 * (num_parameters(OLMOE) - 50_304 * 2048) / H200.bytes_per_s, rel=0.1)


def test_a_plan_that_does_not_fit_advises_no_precision_that_experts_do_not_have() -> None:
    question = Question(
        shape=QWEN,
        gpu=GPUS["h100"],
        gpus=1,
        work=Workload(groups=8, samples=8, prompt=100, answers=Lengths("fixed:100")),
    )
    assert all("fp8" not in name for name, _ in _changes(question))
    with pytest.raises(InputError, match="models with experts are planned in bf16"):
        replace(question, precisions=("fp8",))
