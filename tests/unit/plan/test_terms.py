"""The cost terms agree with hand calculations and with our own measurements."""

from __future__ import annotations

import pytest

from llamarl.families.parameters import block_parameters, num_parameters
from llamarl.model_spec import shape_named
from llamarl.plan.generator import Replica
from llamarl.plan.gpus import GPUS
from llamarl.plan.terms import (
    all_reduce_s,
    decode_terms,
    held_bytes,
    kv_bytes_per_token,
    pass_bytes,
    product_s,
    train_terms,
    training_state_bytes,
    weight_bytes,
)
from llamarl.plan.trainer import TrainerRanks, packed

H200, H100 = GPUS["h200"], GPUS["h100"]
ONE, EIGHT = shape_named("llama-3.2-1b"), shape_named("llama-3.1-8b")


def test_a_product_of_few_rows_takes_its_bytes_and_one_of_many_its_work() -> None:
    few = product_s(H100, "bf16", 1, 4096, 4096)
    assert few == pytest.approx((4096 * 4096 + 4096 + 4096) * 2 / H100.bytes_per_s)
    many = product_s(H100, "bf16", 100_000, 4096, 4096)
    assert many == pytest.approx(2 * 100_000 * 4096 * 4096 / H100.flops("bf16"))


def test_the_cache_of_an_8b_takes_128_kib_a_token() -> None:
    assert kv_bytes_per_token(EIGHT, "bf16") == 2 * 32 * 8 * 128 * 2 == 131_072
    assert kv_bytes_per_token(EIGHT, "bf16", tp=8) == 131_072 / 8
    assert kv_bytes_per_token(EIGHT, "bf16", tp=16) == 131_072 / 8, "key-value heads are not cut"


def test_fp8_halves_the_layers_but_neither_embedding_nor_head() -> None:
    narrow, wide = weight_bytes(EIGHT, "fp8"), weight_bytes(EIGHT, "bf16")
    assert wide == 2 * num_parameters(EIGHT)
    assert wide / 2 < narrow < 0.57 * wide


def test_fp8_arrives_as_it_is_held_and_int8_stands_beside_what_arrived() -> None:
    assert held_bytes(EIGHT, "bf16") == weight_bytes(EIGHT, "bf16")
    assert held_bytes(EIGHT, "fp8") == weight_bytes(EIGHT, "fp8")
    assert held_bytes(EIGHT, "int8") == weight_bytes(EIGHT, "bf16") + block_parameters(EIGHT)


def test_training_costs_six_operations_for_each_weight_and_token() -> None:
    terms = train_terms(ONE, H200, "bf16", tokens=1000, answer_tokens=1000, squares=0, passes=1)
    matrices = num_parameters(ONE) - (2 * 16 + 1) * 2048
    assert terms["products"] * H200.flops("bf16") == pytest.approx(6 * matrices * 1000)
    full = train_terms(ONE, H200, "bf16", tokens=1000, answer_tokens=0, squares=0, passes=1, recompute="full")
    bare = train_terms(ONE, H200, "bf16", tokens=1000, answer_tokens=0, squares=0, passes=1)
    assert full["products"] == pytest.approx(bare["products"] * 8 / 6)


@pytest.mark.parametrize(
    ("model", "precision", "prompt", "tokens_per_s"),
    [
        ("llama-3.2-1b", "bf16", 128, 120_095),
        ("llama-3.1-8b", "bf16", 384, 24_769),
        ("llama-3.1-8b", "fp8", 384, 32_351),
    ],
)
def test_decoding_as_measured_on_one_h200(model: str, precision: str, prompt: int, tokens_per_s: float) -> None:
    """Figures of benchmarks/results/decode.md: 256 sequences, 256 new tokens."""
    replica = Replica(shape_named(model), H200, precision, 1, 256, prompt, prompt + 256)
    assert 256 / replica.step_s(256, 256 * (prompt + 128)) == pytest.approx(tokens_per_s, rel=0.07)


@pytest.mark.parametrize(
    ("model", "recompute", "update_s"), [("llama-3.2-1b", "none", 0.247), ("llama-3.1-8b", "selective", 1.501)]
)
def test_training_as_measured_on_one_h200(model: str, recompute: str, update_s: float) -> None:
    """Figures of benchmarks/results/train.md: 16 documents of 1024 tokens."""
    trainer = TrainerRanks(shape_named(model), H200, "bf16", 1, 1, recompute, 16_384)
    assert trainer.update_s(packed(H200, [1024] * 16, 1.0)) == pytest.approx(update_s, rel=0.07)


def test_memory_as_measured_on_one_h200() -> None:
    """The 1B took 35.7 GiB; the plan adds a few for CUDA itself and for gradients in fp32."""
    trainer = TrainerRanks(ONE, H200, "bf16", 1, 1, "none", 16_384)
    assert 35.7 < trainer.memory_bytes / 2**30 < 45


def test_sums_over_more_ranks_take_longer_and_over_one_nothing() -> None:
    times = [all_reduce_s(H100, 1 << 20, ranks) for ranks in (1, 2, 4, 8, 16, 64, 256)]
    assert times[0] == 0
    assert times == sorted(times)
    assert all_reduce_s(H100, 1 << 30, 8) == pytest.approx(2 * 7 / 8 * (1 << 30) / 450e9, rel=0.05)


def test_sharding_and_recomputing_save_memory() -> None:
    assert training_state_bytes(EIGHT, 1, 64) < training_state_bytes(EIGHT, 1, 8) < training_state_bytes(EIGHT, 1, 1)
    kept = [sum(pass_bytes(EIGHT, 8192, how, 1, 1).values()) for how in ("full", "selective", "none")]
    assert kept == sorted(kept)


def test_more_rows_and_a_fuller_cache_never_make_a_step_shorter() -> None:
    replica = Replica(EIGHT, H100, "bf16", 1, 512, 128, 4096)
    times = [replica.step_s(rows, rows * 1000) for rows in (1, 2, 8, 32, 128, 512)]
    assert times == sorted(times)
    assert replica.step_s(64, 1e6) > replica.step_s(64, 1e5)
    assert all(value >= 0 for value in decode_terms(EIGHT, H100, "bf16", 8, 1000, 4).values())
