"""Ranks built on fake tensors take the memory that the formulas say, and a fault in either is noticed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from llamarl.config import LoraConfig
from llamarl.errors import ConfigError, InputError
from llamarl.families.parameters import block_parameters
from llamarl.machine import GIB
from llamarl.model_spec import shape_named
from llamarl.plan import trainer as planned
from llamarl.plan.generator import Replica
from llamarl.plan.gpus import GPUS
from llamarl.plan.terms import training_state
from llamarl.plan.trainer import TrainerRanks
from llamarl.rehearse import generator, trainer
from llamarl.rehearse.forks import run_in_forks
from llamarl.rehearse.memory import RankMemory, RoleMemory, table_of, too_large
from llamarl.train.optimizer import AdamW

SHAPE = replace(shape_named("llama-3.2-1b"), num_layers=4)
H100 = GPUS["h100"]


def ranks(data: int = 1, tp: int = 1, recompute: str = "full", context: int = 1) -> TrainerRanks:
    return TrainerRanks(SHAPE, H100, "bf16", data, tp, recompute, 4096 * context, context=context)


def trained(layout: TrainerRanks) -> RoleMemory:
    built = trainer.rehearse_trainer(layout, 0, prompt=8, answer=504)
    return RoleMemory("trainer", "", layout.memory_kinds, [built])


def generated(precision: str, tp: int) -> RoleMemory:
    replica = Replica(SHAPE, H100, precision, tp, 32, 64, 512)
    built = generator.rehearse_generator(replica, 0, cached_tokens=20_000, samples=8)
    return RoleMemory("generator", "", replica.memory_kinds(20_000), [built])


@pytest.mark.parametrize(
    ("data", "tp", "recompute", "context"),
    [
        (1, 1, "none", 1),
        (4, 1, "selective", 1),
        (1, 2, "full", 1),
        (64, 4, "full", 1),
        (2, 1, "selective", 4),
    ],
)
def test_a_trainer_rank_takes_what_the_formula_says(data: int, tp: int, recompute: str, context: int) -> None:
    role = trained(ranks(data, tp, recompute, context))
    assert abs(role.difference) < 0.1, "\n".join(table_of([role]))
    assert role.ranks[0].kinds.keys() == role.formula.keys()
    for kind in ("weights", "optimizer state", "gradients"):
        assert role.ranks[0].kinds[kind] == pytest.approx(role.formula[kind], rel=0.02), kind


def test_the_last_rank_of_uneven_shards_takes_no_more_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP pads its shards. Done in the first pass, as no job does it, the optimizer held them a second time."""
    layout = ranks(data=5)

    def taken(rank: int) -> float:
        return sum(trainer.rehearse_trainer(layout, rank, prompt=8, answer=504).kinds.values())

    first = taken(0)
    assert taken(4) <= first
    monkeypatch.setattr(trainer, "_pad_shards", lambda model, tracker: None)
    assert taken(4) > 1.01 * first


@pytest.mark.parametrize("recompute", ["full", "offload"])
def test_one_sequence_of_64k_tokens_makes_nothing_that_the_formula_does_not_know(recompute: str) -> None:
    """No scores of all tokens, which would be 31 GiB, and no wide copies of what an MLP has inside, 2 GiB each. Activations
    in host memory do not count."""
    layout = replace(ranks(recompute=recompute), tokens_per_pack=65_536, shape=replace(SHAPE, num_layers=10))
    built = trainer.rehearse_trainer(layout, 0, prompt=8, answer=65_528)
    role = RoleMemory("trainer", "", layout.memory_kinds, [built])
    assert abs(role.difference) < 0.1, "\n".join(table_of([role]))


@pytest.mark.parametrize(("precision", "tp"), [("bf16", 1), ("bf16", 4), ("fp8", 2), ("int8", 1)])
def test_a_generator_rank_takes_what_the_formula_says(precision: str, tp: int) -> None:
    role = generated(precision, tp)
    assert abs(role.difference) < 0.1, "\n".join(table_of([role]))
    assert role.ranks[0].kinds["KV cache"] == pytest.approx(role.formula["KV cache"], rel=0.01)


MIXTURE = replace(shape_named("olmoe-1b-7b"), num_layers=2)


@pytest.mark.parametrize(
    ("data", "tp", "recompute", "expert"), [(4, 2, "selective", 2), (1, 4, "full", 4), (1, 1, "none", 1)]
)
def test_a_trainer_rank_with_experts_takes_what_the_formula_says(
    data: int, tp: int, recompute: str, expert: int
) -> None:
    role = trained(replace(ranks(data, tp, recompute), shape=MIXTURE, expert=expert))
    assert abs(role.difference) < 0.1, "\n".join(table_of([role]))
    for kind in ("weights", "optimizer state", "gradients"):
        assert role.ranks[0].kinds[kind] == pytest.approx(role.formula[kind], rel=0.02), kind


@pytest.mark.parametrize(("tp", "expert"), [(1, 1), (4, 1), (4, 4), (4, 2)])
def test_a_generator_rank_with_experts_takes_what_the_formula_says(tp: int, expert: int) -> None:
    replica = Replica(MIXTURE, H100, "bf16", tp, 32, 64, 512, expert=expert)
    built = generator.rehearse_generator(replica, 0, cached_tokens=20_000, samples=8)
    role = RoleMemory("generator", "", replica.memory_kinds(20_000), [built])
    assert abs(role.difference) < 0.1, "\n".join(table_of([role]))
    assert role.ranks[0].kinds["weights"] == pytest.approx(role.formula["weights"], rel=0.01)


LORA = LoraConfig(rank=32)


@pytest.mark.parametrize(("data", "tp", "base"), [(4, 1, "bf16"), (1, 2, "bf16"), (1, 1, "fp8")])
def test_a_trainer_rank_with_adapters_takes_what_the_formula_says(data: int, tp: int, base: str) -> None:
    shape = replace(SHAPE, num_layers=2)
    role = trained(replace(ranks(data, tp), lora=LORA, base=base, shape=shape))
    assert abs(role.difference) < 0.1, "\n".join(table_of([role]))
    assert role.ranks[0].kinds["weights"] == pytest.approx(role.formula["weights"], rel=0.05)


def test_a_generator_rank_with_adapters_takes_what_the_formula_says() -> None:
    for precision, tp, merged in (("bf16", 2, False), ("fp8", 1, False), ("bf16", 1, True)):
        replica = Replica(SHAPE, H100, precision, tp, 32, 64, 512, LORA, merged)
        built = generator.rehearse_generator(replica, 0, cached_tokens=20_000, samples=8)
        role = RoleMemory("generator", "", replica.memory_kinds(20_000), [built])
        assert abs(role.difference) < 0.1, "\n".join(table_of([role]))
    beside = replace(replica, merged=False).memory_kinds(20_000)
    assert RoleMemory("generator", "", beside, [built]).difference < -0.1, "a copy that nobody planned is noticed"


def test_optimizer_state_in_host_memory_takes_none_of_the_device() -> None:
    layout = replace(ranks(), offload=True)
    role = trained(layout)
    assert abs(role.difference) < 0.1, "\n".join(table_of([role]))
    assert "optimizer state" not in role.ranks[0].kinds and layout.host_bytes > 1.9 * ranks().memory_kinds["weights"]


def test_weights_that_a_trainer_keeps_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    begin = AdamW.__init__

    def forgetful(self: AdamW, parameters: dict[str, Tensor], *args: Any, **how: Any) -> None:
        kept.extend(parameter.detach().float() for parameter in parameters.values())
        begin(self, parameters, *args, **how)

    monkeypatch.setattr(AdamW, "__init__", forgetful)
    assert trained(ranks()).difference < -0.1


def test_gradients_that_wait_for_the_end_of_a_pass_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow ones of the whole model, beside their sums."""
    layout = replace(ranks(), shape=replace(SHAPE, num_layers=16), tokens_per_pack=1024)

    def late(self: AdamW) -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(AdamW, "summing", late)
    assert trained(layout).ranks[0].kinds["activations"] > 1.3 * layout.memory_kinds["activations"]


def test_a_term_that_the_formula_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "training_state", lambda *args: {**training_state(*args), "gradients": 0.0})
    assert trained(ranks()).difference < -0.1


def test_a_narrow_generator_is_never_wide_while_it_is_built() -> None:
    built = generated("fp8", 1).ranks[0]
    wide_block = 2 * block_parameters(SHAPE) / SHAPE.num_layers
    assert built.building_bytes < built.kinds["weights"] + built.kinds["KV cache"] + wide_block


def test_a_layout_that_does_not_divide_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.tensor: 3 ranks cannot share the model's num_kv_heads=8 evenly"):
        trained(ranks(tp=3))
    replica = Replica(SHAPE, H100, "bf16", 16, 32, 64, 512)
    with pytest.raises(
        InputError, match=r"--build: generator\.tensor: 16 ranks cannot share the model's num_kv_heads=8 evenly"
    ):
        run_in_forks([partial(generator.rehearse_generator, replica, 0, cached_tokens=0.0, samples=8)])


def test_what_torch_refuses_is_told_in_one_line() -> None:
    def refused() -> RankMemory:
        raise RuntimeError("no such thing\nand a long explanation")

    with pytest.raises(InputError, match=r"^--build: RuntimeError: no such thing$"):
        run_in_forks([refused])


def test_every_fork_gives_its_own_answer_in_order() -> None:
    found = run_in_forks([partial(RankMemory, rank, {"weights": float(rank)}) for rank in range(5)])
    assert [memory.rank for memory in found] == list(range(5))


def test_what_does_not_fit_is_told() -> None:
    large = RoleMemory("trainer", "", {}, [RankMemory(0, {"weights": 70.0 * GIB})])
    small = RoleMemory("generator", "", {}, [RankMemory(0, {"weights": 9.0 * GIB}, building_bytes=78.0 * GIB)])
    assert list(too_large([large], H100, together=False)) == []
    (together,) = too_large([large, replace(small, ranks=large.ranks)], H100, together=True)
    assert together.startswith("trainer+generator: takes 140.0 GiB and 3 GiB for CUDA, of 80 GiB on one h100")
    shared = RoleMemory("generator", "", {}, [RankMemory(0, {"weights": 6.0 * GIB})])
    (both,) = too_large([large, shared], H100, together=True, processes=2)
    assert both.startswith("trainer+generator: takes 76.0 GiB and 6 GiB for CUDA"), "each process has its own context"
    assert list(too_large([large, shared], H100, together=True, processes=2, shared_bytes=4.0 * GIB)) == []
    (building,) = too_large([large, small], H100, together=False)
    assert building.startswith("generator: takes 78.0 GiB while it is built")


def test_nothing_is_left_of_a_rehearsal() -> None:
    trained(ranks(2))
    assert not torch.distributed.is_initialized()
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
