"""A snapshot of one mesh is gone on from by any other: the same bits, and the losses of a run that never stopped."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from helpers.meshes import assert_goes_on, chain, same_bits
from helpers.ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

from llamarl.engine.snapshot_store import why_damaged

LAYOUTS = [(1, 2, 2), (1, 2, 1, 2), (1, 1, 1), (2, 1, 1), (1, 1, 2)]  # replicate, data, tensor, context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Tensor]]:
    return chain(LAYOUTS, folder)


def test_training_goes_on_from_mesh_to_mesh(found: list[dict[str, Tensor]], folder: Path) -> None:
    assert_goes_on(found, folder, torch.device("cpu"))


def test_masters_of_bf16_weights_are_the_fp32_weights_of_fsdp(tmp_path: Path) -> None:
    """One data rank holds a master in two halves, several hold it whole: the bits are the same, both ways."""
    narrow = chain([(1, 1, 1), (1, 2, 1), (1, 1, 1)], tmp_path, task="one_more_narrow")
    assert all(same_bits(after, before) for before, after in pairwise(narrow))


def test_shards_that_changed_places_are_noticed(found: list[dict[str, Tensor]], folder: Path) -> None:
    """The files have the same size and the same names of tensors: their hashes tell, and what is read differs."""
    for newer in range(1, len(LAYOUTS)):
        rmtree(folder / str(newer + 1))
    snapshot = folder / "1"
    assert why_damaged(snapshot) == ""
    one, other = (snapshot / "trainer" / f"optimizer-rank{rank:05}-00000.safetensors" for rank in (0, 1))
    left, right = one.read_bytes(), other.read_bytes()
    assert len(left) == len(right) and left != right
    one.write_bytes(right)
    other.write_bytes(left)
    assert "optimizer-rank00000-00000.safetensors: its bytes are not those that were written" in why_damaged(snapshot)
    (folder / "rendezvous").unlink()
    run_ranks("helpers.trainer_rank", 1, "1", "one_more", str(folder))
    assert not same_bits(load_file(folder / "one_more"), found[0])
