"""How a model is laid out over a mesh, and in which types its parameters travel, from the table of its family.

fp8 is e4m3 with one fp32 scale per output row of each generator rank's shard. The matrices of the layers travel in fp8, the
rest in bf16. Scales are parameters of their own, named `..._scale`, with one column for each rank that shares a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.errors import ConfigError
from llamarl.families.adapters import trained_parameters
from llamarl.families.family import COLUMNS, ParameterSpec
from llamarl.layout.boxes import Box, chunk
from llamarl.layout.flat import DTYPE_BYTES
from llamarl.layout.mesh import PRECISIONS, Cut, Placement, Side, box_on
from llamarl.layout.plan import Resharding, TransferPlan, plan_transfer
from llamarl.model_spec import ModelSpec

Boxes = tuple[tuple[Box, ...], tuple[Box, ...]]  # of every source rank, of every target rank
SCALE = "_scale"
FP8 = PRECISIONS["fp8"]
WIDE = PRECISIONS["bf16"]  # type of parameters that are not fp8 where matrices are


def placement_of(parameter: ParameterSpec) -> Placement:
    """Tensor parallelism cuts as the family's table says, and expert parallelism the experts before it; then FSDP cuts the
    rows, or experts, that are left."""
    cuts = [Cut("ep", 0)] if parameter.by_expert else []
    if parameter.split is not None:
        cuts.append(Cut("etp" if parameter.by_expert else "tp", parameter.split, parameter.unit))
    return (*cuts, Cut("fsdp", 0))


def check_shared(shape: ModelSpec, tensor: int, expert: int, section: str) -> None:
    """ConfigError unless tensor ranks can share heads, MLPs and experts evenly; `expert` parts of them hold whole experts."""
    for name, size, ranks in shape.shared_sizes(tensor, expert):
        if size % ranks:
            key = "expert" if name == "experts" else "tensor"
            raise ConfigError(f"{section}.{key}: {ranks} ranks cannot share the model's {name}={size} evenly")


def wire_dtype(parameter: ParameterSpec, precision: str) -> str:
    """Type in which a parameter travels. Embedding, head, norms and biases are too few and too sensitive for fp8."""
    dtype = PRECISIONS[precision]
    return dtype if dtype != FP8 or parameter.is_product else WIDE


def segment_columns(parameter: ParameterSpec, generator_tp: int) -> int:
    """Number of columns of a row that share one scale: as many as one generator rank holds."""
    columns = parameter.shape[1]
    if parameter.split != COLUMNS:
        return columns
    first, end = chunk(0, columns, generator_tp, 0, parameter.unit)
    return end - first


def scale_box(box: Box, width: int) -> Box:
    """Box of the scales of a box: its rows, and every segment of `width` columns that it touches."""
    rows, (first, end) = box
    return rows, (first // width, max(first // width, -(-end // width)))


def model_plan(shape: ModelSpec, trainer: Side, generator: Side, lora: LoraConfig = NO_LORA) -> TransferPlan:
    """The transfer of a whole model, or of its adapters. Parameters that lie alike are planned once, so 405B on 1,024 GPUs
    takes seconds."""
    alike: dict[tuple[int, tuple[Box, ...], tuple[Box, ...]], list[str]] = defaultdict(list)
    cache: dict[tuple[Placement, tuple[int, ...]], Boxes] = {}
    for parameter in trained_parameters(shape, lora).values():
        key = placement_of(parameter), parameter.shape
        if key not in cache:
            cache[key] = _boxes(*key, trainer), _boxes(*key, generator)
        for name, dtype, boxes in _on_the_wire(parameter, cache[key], generator):
            alike[DTYPE_BYTES[dtype], *boxes].append(name)
    found = [
        Resharding(tuple((name, name) for name in names), width, *boxes) for (width, *boxes), names in alike.items()
    ]
    return plan_transfer(found, trainer.mesh.num_ranks, generator.mesh.num_ranks)


def _boxes(placement: Placement, size: tuple[int, ...], side: Side) -> tuple[Box, ...]:
    return tuple(box_on(rank, size, placement, side.mesh) for rank in range(side.mesh.num_ranks))


def _on_the_wire(parameter: ParameterSpec, boxes: Boxes, generator: Side) -> Iterator[tuple[str, str, Boxes]]:
    """Name, type and boxes of a parameter and, in fp8, of its scales."""
    dtype = wire_dtype(parameter, generator.precision)
    yield parameter.name, dtype, boxes
    if dtype == FP8:
        width = segment_columns(parameter, generator.mesh.size("tp"))
        yield parameter.name + SCALE, "float32", (_scale_boxes(boxes[0], width), _scale_boxes(boxes[1], width))


def _scale_boxes(boxes: tuple[Box, ...], width: int) -> tuple[Box, ...]:
    return tuple(scale_box(box, width) for box in boxes)
