"""How models lie on meshes, and what a plan predicts for them."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from llamarl.errors import InputError
from llamarl.families.parameters import num_parameters, parameters
from llamarl.layout.boxes import volume
from llamarl.layout.cost import Links, Prediction, predict
from llamarl.layout.mesh import Mesh, box_on, parse_side
from llamarl.layout.model import model_plan, placement_of
from llamarl.layout.plan import TransferPlan
from llamarl.model_spec import shape_named

GB = 1e9


def plan_for(model: str, trainer: str, generator: str) -> TransferPlan:
    return model_plan(
        shape_named(model), parse_side("--trainer", trainer, "fp32"), parse_side("--generator", generator, "bf16")
    )


def predicted(model: str, trainer: str, generator: str, links: Links | None = None) -> Prediction:
    return predict(plan_for(model, trainer, generator), links or Links())


def test_405b_to_512_generators_is_planned_in_seconds_and_reaches_the_wire() -> None:
    started_s = time.process_time()
    found = predicted("llama-3.1-405b", "fsdp=64,tp=8", "tp=8,replicas=64,precision=fp8")
    assert time.process_time() - started_s < 10
    assert found.total_bytes == found.minimum_bytes
    assert found.floor_s == pytest.approx(1.0258, abs=1e-3), "405 GB in fp8, embedding and head in bf16, scales"
    assert found.predicted_s < 1.1
    assert found.max_sent_bytes < 1.01 * found.max_received_bytes


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen2.5-0.5b", "qwen3-8b", "smollm2-135m"])
@pytest.mark.parametrize("mesh", [Mesh((("fsdp", 3), ("tp", 2))), Mesh((("replicas", 2), ("tp", 3))), Mesh()])
def test_a_layout_holds_every_element_once_per_replica(model: str, mesh: Mesh) -> None:
    shape = shape_named(model)
    for parameter in parameters(shape).values():
        size = parameter.shape
        boxes = {box_on(rank, size, placement_of(parameter), mesh) for rank in range(mesh.num_ranks)}
        assert sum(map(volume, boxes)) == volume(tuple((0, extent) for extent in size)), parameter.name


@pytest.mark.parametrize("model", ["olmoe-1b-7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("mesh", [Mesh((("tp", 4),), 4), Mesh((("tp", 4),), 2), Mesh((("fsdp", 3), ("tp", 4)), 2)])
def test_ranks_that_hold_whole_experts_hold_every_element_once(model: str, mesh: Mesh) -> None:
    for parameter in parameters(replace(shape_named(model), num_layers=1)).values():
        boxes = {box_on(rank, parameter.shape, placement_of(parameter), mesh) for rank in range(mesh.num_ranks)}
        assert sum(map(volume, boxes)) == parameter.size, parameter.name


def test_a_part_of_the_ranks_holds_whole_experts() -> None:
    """64 experts of 1,024 inner units: two parts of four ranks hold 32 each, in halves, and FSDP deals out what is left."""
    gate_up = parameters(shape_named("olmoe-1b-7b"))["model.layers.0.mlp.experts.gate_up_proj"]
    mesh = Mesh((("fsdp", 2), ("tp", 4)), 2)
    boxes = [box_on(rank, gate_up.shape, placement_of(gate_up), mesh) for rank in range(8)]
    assert [(box[0], box[2]) for box in boxes[:4]] == [
        ((0, 16), (0, 512)),
        ((0, 16), (512, 1024)),
        ((32, 48), (0, 512)),
        ((32, 48), (512, 1024)),
    ]
    assert [box[0] for box in boxes[4:]] == [(16, 32), (16, 32), (48, 64), (48, 64)]


def test_experts_go_from_any_cut_to_any_other_and_nothing_twice() -> None:
    plan = plan_for("olmoe-1b-7b", "fsdp=2,tp=4,ep=4", "tp=8,ep=2,replicas=2")
    assert plan.total_bytes == plan.minimum_bytes
    assert max(plan.received_bytes) == min(plan.received_bytes)
    with pytest.raises(InputError, match="ep must divide tp"):
        parse_side("--trainer", "tp=4,ep=3", "bf16")


def test_heads_stay_whole_and_with_the_keys_they_read() -> None:
    """Nine heads share three key-value heads: on two ranks, six heads and two keys, then three and one."""
    found, mesh = parameters(shape_named("smollm2-135m")), Mesh((("tp", 2),))
    rows = {
        name: [box_on(rank, found[name].shape, placement_of(found[name]), mesh)[dim] for rank in range(2)]
        for name, dim in (
            ("model.layers.0.self_attn.q_proj.weight", 0),
            ("model.layers.0.self_attn.k_proj.weight", 0),
            ("model.layers.0.self_attn.o_proj.weight", 1),
        )
    }
    assert list(rows.values()) == [[(0, 384), (384, 576)], [(0, 128), (128, 192)], [(0, 384), (384, 576)]]


def test_bytes_follow_the_precision() -> None:
    count = num_parameters(shape_named("llama-3.1-8b"))
    assert predicted("llama-3.1-8b", "fsdp=8", "precision=bf16").total_bytes == 2 * count
    assert predicted("llama-3.1-8b", "fsdp=8", "precision=fp32").total_bytes == 4 * count
    fp8 = predicted("llama-3.1-8b", "fsdp=8", "precision=fp8").total_bytes
    assert 1.1 * count < fp8 < 1.2 * count, "embedding and head stay in bf16"


def test_replicas_of_the_generator_cost_the_trainer_and_more_trainers_share_it() -> None:
    few = predicted("llama-3.1-8b", "fsdp=8", "replicas=16")
    many = predicted("llama-3.1-8b", "fsdp=16", "replicas=16")
    assert few.max_sent_bytes == pytest.approx(2 * many.max_sent_bytes, rel=0.05)
    assert few.predicted_s == pytest.approx(2 * many.predicted_s, rel=0.1)
    assert predicted("llama-3.1-8b", "replicas=2,fsdp=8", "replicas=16").predicted_s == pytest.approx(
        many.predicted_s, rel=0.1
    )


def test_ranks_of_one_host_talk_over_nvlink_only_when_they_are_placed_together() -> None:
    apart = predicted("llama-3.2-1b", "fsdp=4", "tp=4")
    together = predicted("llama-3.2-1b", "fsdp=4", "tp=4", Links(together=True))
    assert apart.floor_s == pytest.approx(together.floor_s * 9)
    assert together.predicted_s < apart.predicted_s / 5
    slower = predicted("llama-3.2-1b", "fsdp=4", "tp=4", Links(nic_gb_s=25))
    assert slower.floor_s == pytest.approx(2 * apart.floor_s)


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=-1", "tp=x", "pp=2", "tp=2,tp=2", "precision=int3", "tp=2;fsdp=2"])
def test_what_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(InputError, match="--trainer: cannot read '"):
        parse_side("--trainer", text, "fp32")


def test_neighbors_in_tp_are_neighbors_on_a_host_whatever_the_order_of_writing() -> None:
    side = parse_side("--generator", "tp=2,replicas=3,precision=fp8", "bf16")
    assert side.mesh == Mesh((("replicas", 3), ("tp", 2)))
    assert side.precision == "fp8"
    assert [side.mesh.coordinate(rank, "tp") for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [side.mesh.coordinate(rank, "replicas") for rank in range(6)] == [0, 0, 1, 1, 2, 2]
