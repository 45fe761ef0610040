"""Weights that are narrowed block by block are those that are narrowed all at once, and few wide ones exist at a time."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers.models import SHAPE, lively_model
from torch import Tensor

from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits, Precision
from llamarl.generate.loading import load_rank
from llamarl.generate.parallel import TensorRank, split_over_ranks
from llamarl.model.checkpoint import load_model, open_checkpoint, save_model
from llamarl.model.transformer import Transformer

LIMITS = Limits(slots=2, max_prompt_tokens=4, max_new_tokens=4)


def tensors_of(model: Transformer, part: TensorRank, precision: Precision) -> dict[str, Tensor]:
    decoder = ContinuousDecoder(model, LIMITS, eos_ids=(), seed=0, tensor_ranks=part.count, precision=precision)
    return dict(decoder.model.state_dict())


@pytest.mark.parametrize("part", [TensorRank(), TensorRank(1, 2)])
@pytest.mark.parametrize("weights", ["none", "fp8", "int8"])
@pytest.mark.parametrize("keep_wide", [True, False])
def test_a_rank_has_the_same_weights_however_they_are_read(
    part: TensorRank, weights: str, keep_wide: bool, tmp_path: Path
) -> None:
    save_model(lively_model(), tmp_path / "model")
    checkpoint, precision = open_checkpoint(tmp_path / "model"), Precision(weights=weights, keep_wide=keep_wide)  # type: ignore[arg-type]
    cpu = torch.device("cpu")
    model = load_rank(
        checkpoint.shape,
        part,
        precision,
        dtype=torch.bfloat16,
        device=cpu,
        fill=lambda memory: checkpoint.fill(memory, part.box),
    )
    at_once = load_model(tmp_path / "model", dtype=torch.bfloat16, box_of=part.box)
    split_over_ranks(at_once, part)
    found, expected = tensors_of(model, part, precision), tensors_of(at_once, part, precision)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name


def test_no_more_than_one_wide_block_exists_at_a_time() -> None:
    wide: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def fill(memory: Mapping[str, Tensor]) -> None:
        alive.append(sum(one() is not None for one in wide))
        wide.extend(weakref.ref(tensor) for name, tensor in memory.items() if tensor.dim() == 2)

    load_rank(
        SHAPE,
        TensorRank(),
        Precision(weights="fp8", keep_wide=False),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        fill=fill,
    )
    assert alive == [0] * (SHAPE.num_layers + 1)
