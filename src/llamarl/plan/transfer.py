"""Time of a weight transfer from the trainer's ranks to the generators', from the TransferPlan of both layouts."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from msgspec.structs import replace

from llamarl.config.lora import LoraConfig
from llamarl.layout.cost import Links, predict
from llamarl.layout.mesh import Mesh, Side
from llamarl.layout.model import model_plan
from llamarl.model_spec import ModelSpec
from llamarl.plan.generator import Replica
from llamarl.plan.gpus import Gpu
from llamarl.plan.terms import wire
from llamarl.plan.trainer import TrainerRanks


def transfer_s(trainer: TrainerRanks, replica: Replica, replicas: int) -> float:
    """Seconds until all replicas have the trainer's weights."""
    total = trainer.ranks + replica.tp * replicas
    links = _links(trainer.gpu, total)
    copies, data = trainer.replicate, trainer.fsdp_ranks
    precision, lora = wire(replica.precision, replica.shape), trainer.lora
    tensor = (trainer.tp, trainer.expert), (replica.tp, replica.expert)
    return _transfer_s(trainer.shape, copies, data, *tensor, replicas, precision, links, lora)


def _links(gpu: Gpu, total: int) -> Links:
    """Links between all ranks: only NVLink if they fit on one host."""
    return replace(gpu.links, together=total <= gpu.gpus_per_host)


@lru_cache(maxsize=64)
def _transfer_s(
    shape: ModelSpec,
    copies: int,
    data: int,
    trainer_ranks: tuple[int, int],
    generator_ranks: tuple[int, int],
    replicas: int,
    precision: str,
    links: Links,
    lora: LoraConfig,
) -> float:
    """`..._ranks` are those that share a layer, and the parts of them that hold different experts. Computed on a cluster
    smaller by a common divisor, where every rank sends and receives the same number of bytes."""
    fewer = gcd(copies, replicas)
    smaller = gcd(data, replicas // fewer)
    (trainer_tp, trainer_ep), (generator_tp, generator_ep) = trainer_ranks, generator_ranks
    sources = Mesh((("replicas", copies // fewer), ("fsdp", data // smaller), ("tp", trainer_tp)), trainer_ep)
    targets = Mesh((("replicas", replicas // fewer // smaller), ("tp", generator_tp)), generator_ep)
    trainer, generator = Side(sources, "bf16"), Side(targets, precision)
    return predict(model_plan(shape, trainer, generator, lora), links).predicted_s
