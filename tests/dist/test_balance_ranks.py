"""The balancing loss and its gradient are those of one rank, where ranks share products, packs or documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.meshes import run_mesh
from helpers.odd_models import odd_model
from helpers.trainer_rank import balanced
from torch import Tensor

from llamarl.model.checkpoint import save_model
from llamarl.train.mesh import LONE_RANK


def of_balance(found: dict[str, Tensor], recompute: str) -> dict[str, Tensor]:
    """The gradients that the balancing loss adds."""
    prefix = f"{recompute}/0.3/"
    return {
        name.removeprefix(prefix): grad - found[name.replace("/0.3/", "/0.0/")]
        for name, grad in found.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 1, 1, 2)], ids=["tensor", "context"])
def test_ranks_add_the_gradient_of_one_rank(mesh: tuple[int, ...], tmp_path: Path) -> None:
    save_model(odd_model("qwen3_moe"), tmp_path / "model")
    found, alone = run_mesh("balanced", mesh, tmp_path)["balanced"], balanced(LONE_RANK, tmp_path)
    for recompute in ("none", "full"):
        name = f"{recompute}/balance_loss"
        assert found[name].item() == pytest.approx(alone[name].item(), abs=1e-5)
        expected = of_balance(alone, recompute)
        for key, grad in of_balance(found, recompute).items():
            assert (grad - expected[key]).abs().max() < 2e-5, key
        assert expected["model.layers.1.mlp.gate.weight"].abs().max() > 1e-3


def test_data_ranks_have_packs_and_losses_of_their_own(tmp_path: Path) -> None:
    """Each rank's pack has the loss of its own tokens, so that the mean is near that of one pack, not equal to it."""
    save_model(odd_model("qwen3_moe"), tmp_path / "model")
    found, alone = run_mesh("balanced", (1, 2, 1), tmp_path)["balanced"], balanced(LONE_RANK, tmp_path)
    assert found["none/balance_loss"].item() == pytest.approx(alone["none/balance_loss"].item(), rel=0.1)
    name = "model.layers.1.mlp.gate.weight"
    mine, theirs = of_balance(found, "none")[name], of_balance(alone, "none")[name]
    assert (mine - theirs).norm() < 0.5 * theirs.norm()
