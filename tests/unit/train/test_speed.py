"""Floating-point operations counted by hand, for one layer and one document."""

from __future__ import annotations

import pytest
import torch

from llamarl.families.parameters import matrix_parameters, num_parameters
from llamarl.model_spec import ModelSpec, shape_named
from llamarl.train.speed import UpdateWork, flops_of, speed_of, training_flops

SHAPE = ModelSpec(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=20,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    max_positions=64,
    tied_head=True,
)


def test_by_hand() -> None:
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 20  # q, k and v, o, three of the MLP
    assert matrix_parameters(SHAPE) == 3 * layer + 100 * 8
    products = 6 * (3 * layer + 800) * (5 + 7)
    # scores and weighted sum: 2 products of 2 * T * T * 8, causally half of each; three times that with the backward pass
    attention = 3 * 3 * (2 * 2 * 8 / 2) * (25 + 49)
    assert training_flops(SHAPE, [5, 7]) == products + attention


def test_a_lookup_is_no_product() -> None:
    """All parameters of a tied model but its norms; an untied one has its embedding beside."""
    tied, untied = shape_named("llama-3.2-1b"), shape_named("llama-3.1-8b")
    assert matrix_parameters(tied) == num_parameters(tied) - (2 * 16 + 1) * 2048
    assert matrix_parameters(untied) == num_parameters(untied) - (2 * 32 + 1) * 4096 - 128_256 * 4096


def test_speed_is_work_over_time_and_mfu_its_share_of_the_peak() -> None:
    found = speed_of(SHAPE, 12, UpdateWork(10, 70), 2.0, torch.device("cpu"), torch.float32, ranks=2)
    assert found["tokens_per_s"] == 6.0, "all tokens of documents"
    assert found["shared_tokens"] == 2
    assert found["tflops_per_rank"] == pytest.approx(flops_of(SHAPE, UpdateWork(10, 70)) / 2 / 2 / 1e12)
    assert 0 < found["mfu_measured"] < 1
