"""Rehearses the roles of a plan: the first rank of each, and the last one, whose shards may be smaller."""

from __future__ import annotations

from llamarl.families.parameters import parameters
from llamarl.generate.parallel import TensorRank
from llamarl.layout.boxes import shape_of
from llamarl.plan.generator import Replica
from llamarl.plan.search import Plan
from llamarl.plan.trainer import TrainerRanks
from llamarl.plan.workload import Question, Workload
from llamarl.rehearse.generator import rehearse_generator
from llamarl.rehearse.memory import RankMemory, RoleMemory
from llamarl.rehearse.trainer import rehearse_trainer


def rehearse_plan(plan: Plan, question: Question) -> list[RoleMemory]:
    """Memory of trainer and generator."""
    return [
        rehearse_trainer_role(plan.trainers.ranks, question.work),
        rehearse_generator_role(plan.generators.replica, question.work),
    ]


def rehearse_trainer_role(ranks: TrainerRanks, work: Workload) -> RoleMemory:
    """Memory of a trainer's ranks, in an update of this work."""
    built = [trainer_rank(ranks, work, rank) for rank in dict.fromkeys([0, ranks.ranks - 1])]
    layout = f"FSDP {ranks.data} x TP {ranks.tp}, {ranks.tokens_per_pack} tokens, recompute {ranks.recompute}"
    return RoleMemory("trainer", layout, ranks.memory_kinds, built)


def trainer_rank(ranks: TrainerRanks, work: Workload, rank: int) -> RankMemory:
    several = ranks.passes(work.batch(ranks.gpu).tokens) > 1
    return rehearse_trainer(ranks, rank, prompt=work.prompt, answer=round(work.answers.mean), several=several)


def rehearse_generator_role(replica: Replica, work: Workload) -> RoleMemory:
    """Memory of a replica's ranks, with all slots busy. A last rank with shards as large as the first one's is not built."""
    cached_tokens = replica.cached_tokens(work.samples, work.answers)
    built = [rehearse_generator(replica, 0, cached_tokens=cached_tokens, samples=work.samples)]
    if not _same_sizes(replica):
        built.append(rehearse_generator(replica, replica.tp - 1, cached_tokens=cached_tokens, samples=work.samples))
    layout = f"TP {replica.tp}, {replica.precision}, {replica.slots} slots"
    return RoleMemory("generator", layout, replica.memory_kinds(cached_tokens), built)


def _same_sizes(replica: Replica) -> bool:
    first, last = TensorRank(0, replica.tp), TensorRank(replica.tp - 1, replica.tp)
    return all(shape_of(first.box(one)) == shape_of(last.box(one)) for one in parameters(replica.shape).values())
