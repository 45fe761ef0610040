"""How the mesh of a trainer is made."""

from __future__ import annotations

import pytest
import torch

from llamarl.train import mesh


@pytest.mark.parametrize("replicate", [1, 2])
def test_a_rank_selects_its_own_gpu_before_its_mesh_is_made(monkeypatch: pytest.MonkeyPatch, replicate: int) -> None:
    """torch and FSDP would take the GPU with the rank's number, though others may come first: generators, other executors."""
    done: list[object] = []

    class Devices:
        def __getitem__(self, names: object) -> Devices:
            return self

        def _flatten(self, name: str) -> Devices:
            return self

    def made(*args: object, **settings: object) -> Devices:
        done.append("mesh")
        return Devices()

    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(mesh, "init_device_mesh", made)
    mesh.make_mesh(2, 1, rank=0, device=torch.device("cuda", 3), replicate=replicate)
    assert done == [torch.device("cuda", 3), "mesh"]
