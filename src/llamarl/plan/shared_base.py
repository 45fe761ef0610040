"""Memory that a trainer and a generator on one GPU hold together: the frozen base of a model with adapters."""

from __future__ import annotations

from llamarl.plan.generator import Replica
from llamarl.plan.terms import weight_bytes
from llamarl.plan.trainer import TrainerRanks


def shared_base_bytes(trainer: TrainerRanks, replica: Replica) -> float:
    """Bytes of the base that both compute with; 0 if each has its own, since it is split over ranks or of another type."""
    whole = trainer.ranks == 1 and replica.tp == 1
    return (
        weight_bytes(trainer.shape, trainer.base)
        if trainer.lora and whole and replica.precision == trainer.base
        else 0.0
    )
