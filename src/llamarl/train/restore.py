"""Reads the optimizer's state of a snapshot on any mesh, whichever mesh wrote it.

Every rank that wrote has files of its own. Which box of a parameter they hold follows from the mesh that wrote them and the
table of the model's family. A rank reads the slices that its own shards are made of, from as few files as hold them; it holds
one such slice at a time beside its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from llamarl.config.lora import NO_LORA
from llamarl.errors import InputError, ModelError
from llamarl.families.adapters import trained_parameters
from llamarl.families.family import ParameterSpec
from llamarl.layout.boxes import Box, intersect, relative, shape_of, subtract, volume
from llamarl.layout.mesh import Mesh, Placement, box_on
from llamarl.layout.model import placement_of
from llamarl.model.checkpoint import Checkpoint, open_checkpoint
from llamarl.model.safetensors_file import TensorSpan, read_spans
from llamarl.model.tensor_io import read_tensor
from llamarl.model.training_state import OF_POLICY, StateFolders
from llamarl.model.transformer import Transformer
from llamarl.train.optimizer import AdamW
from llamarl.train.shards import trained_shards

MESH_FILE = "mesh.json"
STEPS = "num_steps"

Piece = tuple[int, Box, Box]  # a rank that wrote, the box that it holds, the part of it that is read


class MeshOnDisk(msgspec.Struct, frozen=True):
    """The ranks whose shards make up the state in a snapshot."""

    data: int  # ranks that FSDP sharded the state over
    tensor: int
    expert: int = 1  # parts of the tensor ranks that held different experts

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor

    def file_prefix(self, rank: int) -> str:
        """How the names of a rank's files begin."""
        return "optimizer-" if self.num_ranks == 1 else f"optimizer-rank{rank:05}-"

    def boxes(self, parameter: ParameterSpec) -> list[Box]:
        """The box of a parameter that each rank holds."""
        mesh = Mesh((("fsdp", self.data), ("tp", self.tensor)), self.expert)
        return [box_on(rank, parameter.shape, placement_of(parameter), mesh) for rank in range(self.num_ranks)]


def restore(model: Transformer, optimizer: AdamW, snapshot: Path, folders: StateFolders = OF_POLICY) -> None:
    """Reads the moments of this rank's shards, and the number of steps. Weights are read from the model's folder."""
    lora = model.adapters.lora if model.adapters else NO_LORA
    state = StateOnDisk(snapshot / folders.optimizer, trained_parameters(model.shape, lora))
    shards = trained_shards(model)
    optimizer.num_steps = state.num_steps
    if state.num_steps:
        for slot in optimizer.slots:
            for key in [key for key in slot.kinds if key != "low"]:
                state.read(slot.name, key, shards[slot.name].box, slot.state[key])


@torch.no_grad()
def load_masters(
    model: Transformer, optimizer: AdamW, folder: Path, open_folder: Callable[[Path], Checkpoint] = open_checkpoint
) -> None:
    """Gives the optimizer the folder's weights as masters, since bf16 parameters are rounded. Those that are bf16 in the
    folder too are not read again. Adapters are fp32."""
    checkpoint = None
    for name, shard in trained_shards(model).items():
        if shard.tensor.dtype == torch.bfloat16:
            checkpoint = checkpoint or open_folder(folder)
            if checkpoint.holds_exactly(name, "BF16"):
                master = shard.tensor.float()
            else:
                master = torch.empty(shard.tensor.shape, dtype=torch.float32, device=shard.tensor.device)
                checkpoint.fill({name: master}, lambda _, box=shard.box: box)  # type: ignore[misc]
            optimizer.set_master(name, master)


class StateOnDisk:
    """An optimizer's state in a snapshot: any box of any parameter's moments, from the files of the ranks that hold it."""

    def __init__(self, folder: Path, specs: Mapping[str, ParameterSpec]) -> None:
        self._folder, self._specs = folder, specs
        self._mesh = _read_mesh(self._folder)
        self._files: dict[int, dict[str, TensorSpan]] = {}  # headers that were read, by rank
        self._pieces: dict[tuple[Placement, tuple[int, ...], Box], list[Piece]] = {}
        self.num_steps = self._read_num_steps()

    def read(self, name: str, key: str, box: Box, out: Tensor) -> None:
        """Reads a box of a state tensor such as `exp_avg` into `out`, bit for bit."""
        for rank, held, piece in self._pieces_of(self._specs[name], box):
            span = self._span(rank, f"{name}/{key}", held)
            inside, target = _moved(piece, held), out[relative(piece, box)]
            if target.is_contiguous():
                read_tensor(span, target, inside)
            else:
                slice_ = torch.empty(target.shape, dtype=out.dtype)
                read_tensor(span, slice_, inside)
                target.copy_(slice_)

    def _pieces_of(self, parameter: ParameterSpec, box: Box) -> list[Piece]:
        """The parts of a box that each rank's files hold: each part once, from the first rank that has it."""
        alike = placement_of(parameter), parameter.shape, box
        if alike not in self._pieces:
            self._pieces[alike] = _cover(box, self._mesh.boxes(parameter))
        return self._pieces[alike]

    def _span(self, rank: int, name: str, held: Box) -> TensorSpan:
        spans, who = self._spans_of(rank), f"{self._folder}: rank {rank} of {self._mesh.num_ranks}"
        if name not in spans:
            raise ModelError(f"{who}: {name} is missing")
        if spans[name].shape != shape_of(held):
            found, expected = list(spans[name].shape), list(shape_of(held))
            raise ModelError(f"{who}: {name} has shape {found}; the shard of that rank has {expected}")
        return spans[name]

    def _spans_of(self, rank: int) -> dict[str, TensorSpan]:
        if rank not in self._files:
            spans: dict[str, TensorSpan] = {}
            for path in sorted(self._folder.glob(f"{self._mesh.file_prefix(rank)}*.safetensors")):
                spans.update(read_spans(path))
            for name in spans:
                if name != STEPS and (parameter := name.partition("/")[0]) not in self._specs:
                    raise ModelError(f"{self._folder}: optimizer state of an unknown parameter {parameter}")
            self._files[rank] = spans
        return self._files[rank]

    def _read_num_steps(self) -> int:
        value = torch.zeros(1)
        read_tensor(self._span(0, STEPS, ((0, 1),)), value)
        return int(value.item())


def _cover(box: Box, held: list[Box]) -> list[Piece]:
    found, left = list[Piece](), [box] if volume(box) else []
    for rank, source in enumerate(held):
        for part in list(left):
            if volume(piece := intersect(part, source)):
                found.append((rank, source, piece))
                left.remove(part)
                left.extend(subtract(part, piece))
    return found


def _moved(box: Box, frame: Box) -> Box:
    """A box, counted from the corner of the box `frame` around it."""
    return tuple((part.start, part.stop) for part in relative(box, frame))


def _read_mesh(folder: Path) -> MeshOnDisk:
    try:
        return msgspec.json.decode((folder / MESH_FILE).read_bytes(), type=MeshOnDisk)
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{folder}: cannot tell which ranks made it: {error}") from None
