"""Rehearses the roles of a plan: the first rank of each, and the last one, whose shards may be smaller."""

from __future__ import annotations

from functools import partial

from llamarl.families.parameters import parameters
from llamarl.generate.parallel import TensorRank
from llamarl.layout.boxes import shape_of
from llamarl.plan.generator import Replica
from llamarl.plan.search import Plan
from llamarl.plan.shared_base import shared_base_bytes
from llamarl.plan.trainer import TrainerRanks
from llamarl.plan.workload import Question, Workload
from llamarl.rehearse.forks import Rehearsal, run_in_forks
from llamarl.rehearse.generator import rehearse_generator
from llamarl.rehearse.memory import RoleMemory, too_large
from llamarl.rehearse.trainer import rehearse_trainer


def rehearse_plan(plan: Plan, question: Question) -> list[RoleMemory]:
    """Memory of trainer and generator, as built and by formula."""
    ranks, replica, work = plan.trainers.ranks, plan.generators.replica, question.work
    training, generating = trainer_rehearsals(ranks, work), generator_rehearsals(replica, work)
    built = run_in_forks([*training, *generating])
    away = ", offload" if ranks.offload else ""
    trainer = f"{ranks.layout}, {ranks.tokens_per_pack} tokens, recompute {ranks.recompute}{away}"
    generator = f"{replica.layout}, {replica.precision}, {replica.slots} slots"
    cached_tokens = replica.cached_tokens(work.samples, work.answers)
    return [
        RoleMemory("trainer", trainer, ranks.memory_kinds, built[: len(training)]),
        RoleMemory("generator", generator, replica.memory_kinds(cached_tokens), built[len(training) :]),
    ]


def misfits(plan: Plan, question: Question, roles: list[RoleMemory]) -> list[str]:
    """One line for everything of a rehearsed plan that does not fit into a GPU."""
    ranks, replica = plan.trainers.ranks, plan.generators.replica
    together = plan.colocated or plan.shares_gpu
    processes = 2 if plan.shares_gpu else 1
    shared_bytes = shared_base_bytes(ranks, replica)
    return list(too_large(roles, question.gpu, together=together, processes=processes, shared_bytes=shared_bytes))


def trainer_rehearsals(ranks: TrainerRanks, work: Workload) -> list[Rehearsal]:
    """Rehearsals of a trainer's first and last rank, in an update of this work."""
    rehearse = partial(rehearse_trainer, ranks, prompt=work.prompt, answer=round(work.answers.mean))
    return [partial(rehearse, rank) for rank in dict.fromkeys([0, ranks.ranks - 1])]


def generator_rehearsals(replica: Replica, work: Workload) -> list[Rehearsal]:
    """Rehearsals of a replica's ranks, with all slots busy. A last rank with shards as large as the first one's is left
    out."""
    cached_tokens = replica.cached_tokens(work.samples, work.answers)
    rehearse = partial(rehearse_generator, replica, cached_tokens=cached_tokens, samples=work.samples)
    return [partial(rehearse, rank) for rank in ([0] if _same_sizes(replica) else [0, replica.tp - 1])]


def _same_sizes(replica: Replica) -> bool:
    first, last = (TensorRank(rank, replica.tp, replica.expert) for rank in (0, replica.tp - 1))
    return all(shape_of(first.box(one)) == shape_of(last.box(one)) for one in parameters(replica.shape).values())
