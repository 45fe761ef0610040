"""How a transformer of the Llama family is laid out over a mesh, and in which types its parameters travel.

Tensor parallelism cuts the projections that make heads and hidden units by rows, those that take them by columns, embedding
and head by vocabulary; norms stay whole. FSDP then cuts what is left by rows.

fp8 is e4m3 with one fp32 scale per output row of each generator rank's part: the projections of the layers travel so, the
rest in bf16. Scales are parameters of their own, named `..._scale`, with one column for each rank that shares a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from llamarl.layout.boxes import Box, chunk
from llamarl.layout.flat import DTYPE_BYTES
from llamarl.layout.mesh import PRECISIONS, Cut, Placement, Side, box_on
from llamarl.layout.plan import ShardPattern, TransferPlan, plan_transfer
from llamarl.model_spec import ModelSpec, parameter_shapes

SCALE = "_scale"
FP8 = PRECISIONS["fp8"]


def tensor_parallel_dim(name: str) -> int | None:
    """The dimension that tensor parallelism cuts."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 1
    return None if "norm" in name else 0


def placement_of(name: str, shape: ModelSpec) -> Placement:
    dim = tensor_parallel_dim(name)
    tensor_parallel = () if dim is None else (Cut("tp", dim, _unit(name, shape)),)
    return (*tensor_parallel, Cut("fsdp", 0))


def _unit(name: str, shape: ModelSpec) -> int:
    """Heads stay whole, and with the key-value head that they share."""
    if "k_proj" in name or "v_proj" in name:
        return shape.head_dim
    return shape.q_size // shape.num_kv_heads if "q_proj" in name or "o_proj" in name else 1


def wire_dtype(name: str, precision: str) -> str:
    """What a parameter travels in: embedding, head, norms and biases are too few and too sensitive for fp8."""
    dtype = PRECISIONS[precision]
    return "bfloat16" if dtype == FP8 and not name.endswith("_proj.weight") else dtype


def segment_columns(name: str, columns: int, shape: ModelSpec, generator_tp: int) -> int:
    """How many columns of a row one scale is for: as many as one generator rank holds."""
    if tensor_parallel_dim(name) != 1:
        return columns
    first, end = chunk(0, columns, generator_tp, 0, _unit(name, shape))
    return end - first


def scale_box(box: Box, width: int) -> Box:
    """The scales of a part of a matrix: those of its rows, for every segment of `width` columns that it touches."""
    rows, (first, end) = box
    return rows, (first // width, max(first // width, -(-end // width)))


def model_plan(shape: ModelSpec, trainer: Side, generator: Side) -> TransferPlan:
    """The transfer of a whole model. Only kinds of parameters are looked at, so 405B on 1,024 GPUs takes seconds."""
    kinds: dict[tuple[int, tuple[Box, ...], tuple[Box, ...]], list[str]] = defaultdict(list)
    cache: dict[tuple[Placement, tuple[int, ...]], tuple[tuple[Box, ...], tuple[Box, ...]]] = {}
    for name, size in parameter_shapes(shape).items():
        key = placement_of(name, shape), size
        if key not in cache:
            cache[key] = _boxes(*key, trainer), _boxes(*key, generator)
        for part, dtype, boxes in _on_the_wire(name, size, shape, cache[key], generator):
            kinds[DTYPE_BYTES[dtype], *boxes].append(part)
    found = [
        ShardPattern(tuple((name, name) for name in names), width, *boxes) for (width, *boxes), names in kinds.items()
    ]
    return plan_transfer(found, trainer.mesh.num_ranks, generator.mesh.num_ranks)


def _boxes(placement: Placement, size: tuple[int, ...], side: Side) -> tuple[Box, ...]:
    return tuple(box_on(rank, size, placement, side.mesh) for rank in range(side.mesh.num_ranks))


Boxes = tuple[tuple[Box, ...], tuple[Box, ...]]


def _on_the_wire(
    name: str, size: tuple[int, ...], shape: ModelSpec, boxes: Boxes, generator: Side
) -> Iterator[tuple[str, str, Boxes]]:
    dtype = wire_dtype(name, generator.precision)
    yield name, dtype, boxes
    if dtype == FP8:
        width = segment_columns(name, size[1], shape, generator.mesh.size("tp"))
        yield name + SCALE, "float32", (_scale_boxes(boxes[0], width), _scale_boxes(boxes[1], width))


def _scale_boxes(boxes: tuple[Box, ...], width: int) -> tuple[Box, ...]:
    return tuple(scale_box(box, width) for box in boxes)
