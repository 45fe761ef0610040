"""Plans of models with experts: memory by all parameters, operations by the active ones, bytes by the used ones."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamarl.config.lora import LoraConfig
from llamarl.errors import InputError
from llamarl.families.parameters import active_block_parameters, block_parameters, matrix_parameters, num_parameters
from llamarl.model_spec import SHAPES
from llamarl.plan.advice import _changes
from llamarl.plan.fallback import async_plan
from llamarl.plan.generator import Replica
from llamarl.plan.gpus import GPUS
from llamarl.plan.jobfile import job_settings
from llamarl.plan.lengths import Lengths
from llamarl.plan.terms import (
    _kept_bytes,
    busiest_share,
    decode_terms,
    fullest_share,
    recomputed_parameters,
    train_terms,
    training_state_bytes,
    weight_bytes,
)
from llamarl.plan.transfer import transfer_s
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


def test_layers_with_experts_keep_one_result_for_each_expert_of_a_token() -> None:
    """That of the first product, and the router's input; dense layers keep two results, and what the activation made."""
    mixed, dense = replace(OLMOE, num_layers=2), replace(OLMOE, num_layers=2, dense_layers=(0, 1))
    for shape, expected in ((mixed, 2 * 8 * 2 * 1024 + 4 * 2048), (dense, 2 * 3 * OLMOE.intermediate_size)):
        whole, attention = (_kept_bytes(shape, how, 1, 2) for how in ("none", "selective"))
        assert whole - attention == expected


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
    assert all("fp8" not in name for name, _ in _changes(question)), "wide weights stay beside narrow ones"
    with pytest.raises(InputError, match="--base fp8: experts are trained in their own precision"):
        replace(question, precisions=("fp8",), base="fp8", lora=LoraConfig(rank=8))


def test_narrow_experts_are_read_in_half_the_time_and_multiplied_as_wide_ones() -> None:
    for name in ("fp8", "int8"):
        few, many = (
            [decode_terms(OLMOE, H200, precision, rows, 0)["products"] for precision in ("bf16", name)]
            for rows in (64, 1 << 17)
        )
        assert 0.45 < few[1] / few[0] < 0.6, "bound by the bytes of the experts"
        assert many[1] / many[0] > 0.75, "bound by operations, of which those of experts are in bf16"
        wide, narrow = (Replica(OLMOE, H200, one, 1, 64, 128, 512).memory_kinds(0)["weights"] for one in ("bf16", name))
        assert narrow == pytest.approx(1.5 * wide, rel=0.05)


def test_a_plan_with_adapters_says_which_layers_have_them() -> None:
    work = Workload(groups=8, samples=8, prompt=100, answers=Lengths("fixed:100"))
    question = Question(shape=OLMOE, gpu=H200, gpus=2, work=work, lora=LoraConfig(rank=8, targets="attention"))
    for asked, told in ((question, {"targets": "attention"}), (replace(question, lora=LoraConfig(rank=8)), {})):
        plan = async_plan(asked)
        assert plan is not None
        assert job_settings(plan, asked)["model"]["lora"] == {"rank": 8, **told}


def test_a_plan_takes_narrow_experts_where_they_are_asked_for() -> None:
    question = Question(
        shape=OLMOE,
        gpu=H200,
        gpus=8,
        work=Workload(groups=32, samples=8, prompt=100, answers=Lengths("fixed:500")),
        precisions=("fp8",),
    )
    narrow, wide = async_plan(question), async_plan(replace(question, precisions=("bf16",)))
    assert narrow is not None and wide is not None
    assert job_settings(narrow, question)["generator"]["quantize"] == "fp8"
    assert narrow.generators.replica.precision == "fp8" and narrow.generators.replica.step_s(
        64, 0
    ) < wide.generators.replica.step_s(64, 0)


def test_a_rank_with_whole_experts_takes_more_room_and_about_the_same_time() -> None:
    """Weights are the same; the inner units of rows that other ranks compute have room here, too; and all wait for the rank
    with most tokens, whose share comes to the mean with many of them."""
    cut, whole = (Replica(OLMOE, H200, "bf16", 8, 64, 128, 512, expert=expert) for expert in (1, 8))
    assert cut.memory_kinds(0)["weights"] == whole.memory_kinds(0)["weights"]
    assert cut.memory_kinds(0)["activations"] < whole.memory_kinds(0)["activations"]
    assert whole.step_s(64, 0) == pytest.approx(cut.step_s(64, 0), rel=0.2)
    shares = [busiest_share(copies, 8) for copies in (1, 64, 1e6)]
    assert shares[0] > 0.7 and shares[1] > 1.5 / 8 and shares[2] == pytest.approx(1 / 8, rel=0.02)
    assert busiest_share(10, 1) == 1.0


def test_fsdp_deals_out_whole_experts() -> None:
    """64 of them, or 8 on each of eight parts: over 16 FSDP ranks, a rank holds 4 of 64, or one of 8, twice its share."""
    assert fullest_share(OLMOE, 16) == 1.0 and fullest_share(OLMOE, 48) > 1.4
    assert fullest_share(OLMOE, 16, 8) == pytest.approx(1 + 6.44e9 / 6.92e9, rel=0.01)
    assert fullest_share(SHAPES["llama-3.1-8b"], 48) == 1.0
    assert training_state_bytes(OLMOE, 8, 16, expert=8) > 1.9 * training_state_bytes(OLMOE, 8, 16)


def test_a_plan_is_given_its_ranks_of_experts() -> None:
    question = Question(
        shape=OLMOE,
        gpu=H200,
        gpus=16,
        work=Workload(groups=32, samples=8, prompt=100, answers=Lengths("fixed:100")),
        expert=4,
    )
    plan = async_plan(question)
    assert plan and plan.trainers.ranks.expert == plan.generators.replica.expert == 4
    assert plan.trainers.ranks.tp % 4 == plan.generators.replica.tp % 4 == 0
    written = job_settings(plan, question)
    assert written["trainer"]["expert"] == written["generator"]["expert"] == 4
    assert transfer_s(plan.trainers.ranks, plan.generators.replica, 1) > 0
    with pytest.raises(InputError, match="the model has 64 experts; it must divide them"):
        replace(question, expert=5)
