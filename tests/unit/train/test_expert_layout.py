"""Which experts a rank of the trainer holds is what the layouts of transfers and snapshots say."""

from __future__ import annotations

import pytest
import torch
from helpers.experts import SHAPE as MIXTURE
from msgspec.structs import replace
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from llamarl.families.parameters import parameters
from llamarl.layout.boxes import shape_of
from llamarl.model.experts import ExpertMLP
from llamarl.rehearse.world import fake_ranks
from llamarl.train.mesh import make_mesh
from llamarl.train.policy import ComputeSettings, meta_shards
from llamarl.train.restore import MeshOnDisk
from llamarl.train.shards import owned_shards

CPU = torch.device("cpu")
SHAPE = replace(MIXTURE, num_kv_heads=4)


@pytest.mark.parametrize(
    ("replicate", "data", "tensor", "expert"),
    [(1, 1, 2, 2), (1, 2, 4, 2), (1, 3, 2, 2), (2, 2, 4, 2), (1, 2, 2, 1), (1, 5, 2, 2)],
)
def test_every_rank_owns_the_boxes_of_its_mesh(replicate: int, data: int, tensor: int, expert: int) -> None:
    for rank in range(replicate * data * tensor):
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it holds the equal meshes of the rank before
        with fake_ranks(rank, replicate * data * tensor):
            mesh = make_mesh(data, tensor, rank, CPU, replicate, expert=expert)
            model = meta_shards(SHAPE, ComputeSettings(CPU, torch.float32, mesh))
            owned, on_disk = owned_shards(model), MeshOnDisk(data, tensor, expert)
            for parameter in parameters(SHAPE).values():
                expected = on_disk.boxes(parameter)[rank % on_disk.num_ranks]
                box = owned[parameter.name].box
                assert shape_of(box) == shape_of(expected), (rank, parameter.name)
                if 0 not in shape_of(expected):
                    assert box == expected, (rank, parameter.name)
            mlp = model.model.layers[0].mlp
            assert isinstance(mlp, ExpertMLP)
            assert mlp.experts.first == mesh.tensor_rank // (tensor // expert) * (SHAPE.experts // expert)
