"""An optimizer's masters are the folder's numbers, bit for bit; what a bf16 folder holds is not read twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers.models import lively_model
from torch import Tensor

from llamarl.config import TrainerConfig
from llamarl.model.checkpoint import BoxOf, Checkpoint, load_model, open_checkpoint, save_model
from llamarl.train.optimizer import AdamW
from llamarl.train.restore import load_masters


@pytest.mark.parametrize(
    ("stored", "read_again"), [(torch.bfloat16, False), (torch.float32, True), (torch.float16, True)]
)
def test_masters_are_those_of_the_folder(
    stored: torch.dtype, read_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(lively_model(), tmp_path / "model", dtype=stored)
    exact: dict[str, Tensor] = dict(load_model(tmp_path / "model").named_parameters())
    model = load_model(tmp_path / "model", dtype=torch.bfloat16)
    adamw = AdamW(dict(model.named_parameters()), TrainerConfig())
    reads, fill = list[str](), Checkpoint.fill

    def counted(self: Checkpoint, memory: Mapping[str, Tensor], box_of: BoxOf) -> None:
        reads.extend(memory)
        fill(self, memory, box_of)

    monkeypatch.setattr(Checkpoint, "fill", counted)
    load_masters(model, adamw, tmp_path / "model")
    masters = dict(adamw.masters())
    assert masters.keys() == exact.keys()
    for name, master in masters.items():
        assert torch.equal(master, exact[name]), name
    assert bool(reads) == read_again


def test_a_type_of_the_folder_that_rounds_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    save_model(lively_model(), tmp_path / "model", dtype=torch.float16)
    checkpoint = open_checkpoint(tmp_path / "model")
    name = next(iter(checkpoint.spans))
    assert checkpoint.holds_exactly(name, "F16") and not checkpoint.holds_exactly(name, "BF16")
