"""Tensor ranks share the parameters of every family: norms that span all heads, biases, sandwich norms, softcaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.odd_models import odd_model
from helpers.ranks import run_ranks
from helpers.tensor_rank import check_same_tokens, decode
from helpers.trainer_rank import DOCUMENTS
from helpers.training import assert_same_gradients, make_test_documents, naive_gradients
from safetensors.torch import load_file

from llamarl.generate.limits import Precision
from llamarl.generate.parallel import TensorRank
from llamarl.model.checkpoint import save_model

FAMILIES = ["llama", "olmo2", "gemma2", "qwen3_moe", "olmoe"]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_trainer_ranks_compute_what_one_computes(name: str, tmp_path: Path) -> None:
    save_model(odd_model(name), tmp_path / "model")
    run_ranks("helpers.trainer_rank", 2, "1x1", "gradients", str(tmp_path))
    loss, expected = naive_gradients(odd_model(name), make_test_documents(DOCUMENTS))
    found = load_file(tmp_path / "gradients")
    gradients = {key.removeprefix("full/"): value for key, value in found.items() if key.startswith("full/")}
    assert gradients.pop("loss").item() == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(gradients, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_generator_ranks_sample_what_one_samples(name: str, tmp_path: Path) -> None:
    save_model(odd_model(name), tmp_path / "model")
    run_ranks("helpers.tensor_rank", 2, str(tmp_path))
    check_same_tokens(tmp_path, 2)


def test_two_generator_ranks_quantize_their_shards_of_experts(tmp_path: Path) -> None:
    """Each has scales of its own, so they are near what one rank quantizes, and sample the same tokens as each other."""
    save_model(odd_model("qwen3_moe"), tmp_path / "model")
    run_ranks("helpers.tensor_rank", 2, str(tmp_path), "quantized")
    first, second = (json.loads((tmp_path / f"quantized-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    whole = decode(tmp_path / "model", TensorRank(), Precision(weights="fp8", kv_cache="fp8"))
    plain = decode(tmp_path / "model", TensorRank())
    near = [
        abs(mine[1][0] - other[1][0])
        for ordinal, found in whole.items()
        for mine, other in zip(first[ordinal], found, strict=True)
        if mine[0][0] == other[0][0]
    ]
    assert len(near) > 6 and sorted(near)[len(near) // 2] < 0.1
    assert first != json.loads(json.dumps(plain)), "quantizing changed nothing"
