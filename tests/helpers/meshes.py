"""A training that goes on from mesh to mesh: one update on each, from the snapshot that the mesh before it made."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.models import lively_model
from helpers.ranks import run_ranks
from helpers.trainer_rank import DOCUMENTS, make_learner, train
from helpers.training import assert_same_gradients, make_test_documents, naive_gradients
from llamarl.model.checkpoint import save_model
from llamarl.model.transformer import Transformer
from llamarl.train.mesh import LONE_RANK

Layout = tuple[int, ...]  # replicate, data, tensor; context and expert, if they are not 1


def run_mesh(tasks: str, layout: Layout, folder: Path, device: str = "cpu") -> dict[str, dict[str, Tensor]]:
    """What rank 0 of a trainer with this mesh found, by task."""
    replicate, data, tensor, context, expert = (*layout, 1, 1)[:5]
    (folder / "rendezvous").unlink(missing_ok=True)
    ranks, mesh = replicate * data * tensor * context, f"{replicate}x{data}x{context}x{expert}"
    run_ranks("helpers.trainer_rank", ranks, mesh, tasks, str(folder), device=device)
    return {task: load_file(folder / task) for task in tasks.split(",")}


def chain(
    layouts: list[Layout], folder: Path, device: str = "cpu", task: str = "one_more", model: Transformer | None = None
) -> list[dict[str, Tensor]]:
    """What each mesh has read, computed and written."""
    save_model(model or lively_model(), folder / "model")
    return [run_mesh(task, layout, folder, device)[task] for layout in layouts]


def assert_noticed(found: dict[str, Tensor]) -> None:
    """What the task `apart` found: replicas that are not summed have other gradients, and are told apart."""
    _, expected = naive_gradients(lively_model(), make_test_documents(DOCUMENTS))
    assert found["drift"].item() == 1 and found["one_bit"].item() == 1
    with pytest.raises(AssertionError):
        assert_same_gradients({name: found[name] for name in expected}, expected)


def same_bits(found: dict[str, Tensor], before: dict[str, Tensor]) -> bool:
    """Whether a mesh has read what the one before it had written: weights and moments, bit for bit."""
    read = {name.removeprefix("read/"): one for name, one in found.items() if name.startswith("read/")}
    written = {name.removeprefix("written/"): one for name, one in before.items() if name.startswith("written/")}
    return read.keys() == written.keys() and all(torch.equal(read[name], written[name]) for name in read)


def assert_goes_on(found: list[dict[str, Tensor]], folder: Path, device: torch.device) -> None:
    """Each mesh reads the bits of the one before, and losses are those of one rank that never stopped."""
    for before, after in pairwise(found):
        assert any("exp_avg_sq" in name for name in after), "moments are among what is compared"
        assert same_bits(after, before)
    learner = make_learner(folder / "model", LONE_RANK, device=device)
    for update, one in enumerate(found):
        expected = train(learner, first=update, last=update + 1)
        assert one["loss"].item() == pytest.approx(expected["loss"], rel=1e-4, abs=1e-5), update
        assert one["grad_norm"].item() == pytest.approx(expected["grad_norm"], rel=1e-3), update
