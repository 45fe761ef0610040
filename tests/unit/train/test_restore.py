"""Every mesh reads the optimizer's state that any other mesh wrote, slice by slice."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.experts import SHAPE as MIXTURE
from helpers.layouts import part
from msgspec.structs import replace
from torch import Tensor

from llamarl.errors import InputError, ModelError
from llamarl.families.parameters import parameters
from llamarl.layout.boxes import Box, shape_of, volume
from llamarl.model.safetensors_file import TensorSpan
from llamarl.model.tensor_io import read_tensor, write_tensors
from llamarl.model.training_state import OPTIMIZER
from llamarl.train import restore
from llamarl.train.restore import MeshOnDisk, StateOnDisk

SPEC = replace(MIXTURE, qk_norm=True, num_kv_heads=4)
MESHES = [MeshOnDisk(data, tensor) for data, tensor in product((1, 2, 3, 5), (1, 2, 4))]
MESHES += [MeshOnDisk(1, 2, 2), MeshOnDisk(2, 4, 2), MeshOnDisk(3, 2, 2)]  # with whole experts on parts of the ranks


@pytest.fixture(scope="module")
def moments() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"{one.name}/exp_avg": torch.randn(one.shape) for one in parameters(SPEC).values()}


def write(folder: Path, mesh: MeshOnDisk, moments: dict[str, Tensor], num_steps: int = 3) -> Path:
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "mesh.json").write_bytes(msgspec.json.encode(mesh))
    for rank in range(mesh.num_ranks):
        mine = {
            f"{one.name}/exp_avg": part(moments[f"{one.name}/exp_avg"], mesh.boxes(one)[rank])
            for one in parameters(SPEC).values()
        }
        tensors = {**mine, "num_steps": torch.tensor([float(num_steps)])}
        write_tensors(folder / "trainer" / f"{mesh.file_prefix(rank)}00000.safetensors", tensors, torch.float32)
    return folder


def read(snapshot: Path, mesh: MeshOnDisk, rank: int) -> dict[str, Tensor]:
    state, found = StateOnDisk(snapshot / OPTIMIZER, parameters(SPEC)), dict[str, Tensor]()
    for one in parameters(SPEC).values():
        box = mesh.boxes(one)[rank]
        found[f"{one.name}/exp_avg"] = torch.full(shape_of(box), torch.nan)
        state.read(one.name, "exp_avg", box, found[f"{one.name}/exp_avg"])
    return found


@pytest.mark.parametrize("wrote", MESHES, ids=str)
def test_every_mesh_reads_what_any_other_wrote(wrote: MeshOnDisk, moments: dict[str, Tensor], tmp_path: Path) -> None:
    snapshot = write(tmp_path / "1", wrote, moments)
    for mesh in MESHES:
        for rank in range(mesh.num_ranks):
            found = read(snapshot, mesh, rank)
            for one in parameters(SPEC).values():
                name = f"{one.name}/exp_avg"
                assert torch.equal(found[name], part(moments[name], mesh.boxes(one)[rank])), (mesh, rank, name)


def test_a_rank_reads_no_more_than_its_shards(
    moments: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number once, at most one parameter's slice at a time, and only from files that hold something of its own."""
    snapshot, mesh = write(tmp_path / "1", MeshOnDisk(1, 4), moments), MeshOnDisk(8, 1)
    sizes, files = list[int](), set[str]()

    def watched(span: TensorSpan, out: Tensor, box: Box | None = None) -> None:
        sizes.append(out.numel())
        files.add(span.path.name)
        read_tensor(span, out, box)

    monkeypatch.setattr(restore, "read_tensor", watched)
    read(snapshot, mesh, 7)
    mine = [volume(mesh.boxes(one)[7]) for one in parameters(SPEC).values()]
    assert sum(sizes) == sum(mine) + 1, "and the number of steps"
    assert max(sizes) <= max(mine)
    files.clear()
    head = parameters(SPEC)["lm_head.weight"]
    box = mesh.boxes(head)[7]
    StateOnDisk(snapshot / OPTIMIZER, parameters(SPEC)).read(head.name, "exp_avg", box, torch.empty(shape_of(box)))
    assert files == {"optimizer-rank00000-00000.safetensors", "optimizer-rank00003-00000.safetensors"}


def test_a_wrong_slice_is_noticed(moments: dict[str, Tensor], tmp_path: Path) -> None:
    """State of fewer ranks than the mesh says, or of other ones, is refused in one line."""
    snapshot = write(tmp_path / "1", MeshOnDisk(2, 2), moments)
    (snapshot / "trainer/mesh.json").write_text('{"data":4,"tensor":1}')
    with pytest.raises(ModelError, match=r"rank 0 of 4: .* has shape \[.*\]; the shard of that rank has"):
        read(snapshot, MeshOnDisk(1, 1), 0)
    (snapshot / "trainer/mesh.json").write_text('{"data":2,"tensor":2}')
    (snapshot / "trainer/optimizer-rank00003-00000.safetensors").unlink()
    with pytest.raises(ModelError, match=r"rank 3 of 4: .*/exp_avg is missing"):
        read(snapshot, MeshOnDisk(1, 1), 0)
    (snapshot / "trainer/mesh.json").unlink()
    with pytest.raises(InputError, match="cannot tell which ranks made it"):
        StateOnDisk(snapshot / OPTIMIZER, parameters(SPEC))
