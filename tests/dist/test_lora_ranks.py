"""Adapters on every mesh: the merged model's gradients and log-probs, the same start, and snapshots for any other mesh."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.lora import LORA, merged_gradients, random_adapters, save_both
from helpers.meshes import run_mesh, same_bits
from helpers.models import SHAPE
from helpers.tensor_rank import check_adapted_ranks
from helpers.trainer_rank import DOCUMENTS, adapters
from helpers.training import assert_same_gradients, make_test_documents
from msgspec.structs import replace
from torch import Tensor

from llamarl.families.adapters import num_adapter_parameters
from llamarl.train.mesh import LONE_RANK

MESHES = {  # replicate, data, tensor, context
    "fsdp=2": (1, 2, 1),
    "tp=2": (1, 1, 2),
    "fsdp=2,tp=2": (1, 2, 2),
    "hsdp=2,tp=2": (2, 1, 2),
    "context=2": (1, 1, 1, 2),
}
Found = dict[str, Tensor]


@pytest.fixture(scope="module", params=list(MESHES.values()), ids=list(MESHES))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Found], Path]:
    folder = tmp_path_factory.mktemp("ranks")
    save_both(folder)
    return run_mesh("adapters,narrow_adapters", request.param, folder), folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("alone")
    save_both(folder)
    return adapters(LONE_RANK, folder)


def named(found: Found, prefix: str) -> Found:
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


@pytest.mark.parametrize("case", ["one", "several", "selective", "full"])
def test_gradients_equal_those_of_the_merged_model(both: tuple[dict[str, Found], Path], case: str) -> None:
    found, folder = both
    loss, expected = merged_gradients(folder / "adapter", make_test_documents(DOCUMENTS), random_adapters())
    gradients = named(found["adapters"], f"{case}/")
    assert gradients.pop("loss").item() == pytest.approx(loss, abs=1e-5)
    assert_same_gradients(gradients, expected)


def test_ranks_compute_and_make_what_one_rank_does(both: tuple[dict[str, Found], Path], alone: Found) -> None:
    found = both[0]["adapters"]
    for name in ("with", "without"):
        assert torch.allclose(found[name], alone[name], atol=1e-5), name
    assert found["grad_norm"].item() == pytest.approx(alone["grad_norm"].item(), rel=1e-3)
    made, expected = named(found, "made/"), named(alone, "made/")
    differs = torch.cat([(made[name] - one).abs().flatten() > 1e-4 for name, one in expected.items()])
    assert differs.float().mean() < 2e-3
    assert torch.equal(found["hash"], alone["hash"]), "of the adapters that were read"
    assert found["same"].item() == 1, "a snapshot is gone on from bit for bit"
    assert 0 < found["held"][0] < num_adapter_parameters(SHAPE, LORA), "a rank holds its share of the adapters"


def test_bf16_passes_hold_a_bf16_base_and_fp32_adapters(both: tuple[dict[str, Found], Path], alone: Found) -> None:
    narrow, wide = both[0]["narrow_adapters"], named(alone, "one/")
    for name, grad in narrow.items():
        agreement = torch.nn.functional.cosine_similarity(grad.flatten(), wide[name].flatten(), dim=0)
        assert agreement > 0.9, name


def test_tied_heads_and_head_norms_go_with_adapters(tmp_path: Path) -> None:
    """None of them is trained."""
    shape = replace(SHAPE, tied_head=True, qk_norm=True)
    save_both(tmp_path, shape=shape)
    found = named(run_mesh("adapters", (1, 2, 2), tmp_path)["adapters"], "several/")
    _, expected = merged_gradients(tmp_path / "adapter", make_test_documents(DOCUMENTS), random_adapters(shape=shape))
    del found["loss"]
    assert_same_gradients(found, expected)


def test_adapters_go_on_from_mesh_to_mesh(tmp_path: Path) -> None:
    """The same bits of adapters and moments on every mesh."""
    save_both(tmp_path)
    chain = []
    for mesh in ((1, 2, 2), (1, 2, 1), (1, 1, 1), (2, 1, 1)):
        (tmp_path / "rendezvous").unlink(missing_ok=True)
        chain.append(run_mesh("one_more_adapted", mesh, tmp_path)["one_more_adapted"])
    for before, after in pairwise(chain):
        assert any("exp_avg_sq" in name for name in after) and same_bits(after, before)
    assert {path.name for path in (tmp_path / "1" / "policy").glob("*.safetensors")} == {"adapter_model.safetensors"}


@pytest.mark.parametrize("lora", ["beside", "merged"])
def test_two_generator_ranks_sample_with_adapters_what_the_merged_model_samples(lora: str, tmp_path: Path) -> None:
    check_adapted_ranks(tmp_path, lora, 2)
