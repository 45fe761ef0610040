"""Searches for the best co-located synchronous and the best asynchronous plan for a model on a number of GPUs.

Trainer and generators are priced separately and then combined; options that cannot win are pruned. The result is that of
trying everything (a test compares both), but for the thinned splits of more than a thousand GPUs. Times are closed forms;
a simulation with the real controller shows how well they hold, and decides among splits that are nearly as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import inf
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from llamarl.controller.default_line import GENERATOR_AHEAD
from llamarl.plan.generator import Replica
from llamarl.plan.shared_base import shared_base_bytes
from llamarl.plan.terms import WORKSPACE_BYTES, copy_s, published_bytes, sync_s, weight_bytes, wire
from llamarl.plan.trainer import TrainerRanks
from llamarl.plan.workload import Question

RECOMPUTE = ("none", "selective", "full")
PACKS = (4096, 8192, 16_384, 32_768, 65_536)
STALENESS_PRICE = 0.01  # share by which one more version of staleness must shorten a step
_SPLITS = 128  # numbers of training GPUs that are tried at most
_NEAR = 1.05  # times the best price, up to which a plan may turn out to be the best in a simulation
_NEAR_PLANS = 3  # that are simulated at most
_ROUNDS = 4  # fixed-point iterations; with fewer, a slower trainer could seem to shorten a step
_MIDDLES = (np.arange(24) + 0.5) / 24

Limit = Literal["training", "generation", "the longest answers", "training and generation in turn"]


class Trainers(Struct, frozen=True):
    """A trainer's layout, its time per update, and its memory per rank."""

    ranks: TrainerRanks
    update_s: float
    memory_bytes: float


class Generators(Struct, frozen=True, dict=True):
    """Identical generator replicas. `replicas` may be a fraction, to price one more GPU."""

    replica: Replica
    replicas: float
    memory_bytes: float


class Plan(Struct, frozen=True):
    """A complete plan: layouts of both roles, staleness, step time and what limits it."""

    trainers: Trainers
    generators: Generators
    colocated: bool
    max_staleness: int
    step_s: float
    limit: Limit
    note: str = ""
    """Why the generators are not of the kind that was asked for; empty if they are."""
    shares_gpu: bool = False
    """Whether both roles work at the same time on the one GPU that there is."""

    @property
    def can_be_built(self) -> bool:
        """Whether builders accept the layout; one that copies key-value heads is only a baseline."""
        replica = self.generators.replica
        return replica.shape.splits_over(replica.tp, replica.expert)

    @property
    def price(self) -> float:
        """Step time with a surcharge for staleness; the best plan has the lowest price."""
        return priced(self.step_s, self.max_staleness)

    @property
    def memory_bytes(self) -> float:
        """Memory of the fullest GPU."""
        together = both_bytes(self.trainers, self.generators)
        if self.colocated:
            return together - WORKSPACE_BYTES
        if self.shares_gpu:
            return together
        return max(self.trainers.memory_bytes, self.generators.memory_bytes)


def priced(step_s: float, max_staleness: int) -> float:
    """The price of a step: its time, with a surcharge for staleness."""
    return step_s * (1 + STALENESS_PRICE * max_staleness)


def both_bytes(trainers: Trainers, generators: Generators) -> float:
    """Memory of a GPU on which both roles have a rank; a frozen base counts once."""
    shared = shared_base_bytes(trainers.ranks, generators.replica)
    return trainers.memory_bytes + generators.memory_bytes - shared


class Space:
    """The search space of one question: the options of each role, and their prices."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._batch = question.work.batch(question.gpu, question.shape.windows)

    # Options

    @cached_property
    def splits(self) -> list[int]:
        """Possible numbers of training GPUs: whole hosts if there are many hosts, else any number; of more than `_SPLITS`,
        as many evenly spaced ones."""
        question = self.question
        grain = question.gpu.gpus_per_host if question.gpus >= 8 * question.gpu.gpus_per_host else 1
        grain *= -(-question.gpus // (grain * _SPLITS))
        return list(range(grain, question.gpus, grain))

    def trainers(self, gpus: int) -> Iterator[Trainers]:
        """Yield every trainer layout that fits `gpus` GPUs, with its price."""
        for sharded in self._trainer_ranks(gpus):
            for ranks in (sharded, *self._replicated(sharded)):
                if self.fits(memory_bytes := ranks.memory_bytes):
                    yield Trainers(ranks, ranks.update_s(self._batch), memory_bytes)

    def _replicated(self, ranks: TrainerRanks) -> Iterator[TrainerRanks]:
        """Yield the same ranks as replicas of whole hosts, where sharding over all of them takes longer than computing."""
        per_host = self.question.gpu.gpus_per_host
        hosts, rest = divmod(ranks.ranks, per_host)
        if rest or hosts == 1 or not ranks.waits_for_shards(self._batch):
            return
        for each in (hosts // count for count in range(2, hosts + 1) if hosts % count == 0):
            if each * per_host % (ranks.tp * ranks.context) == 0:
                yield replace(ranks, data=each * per_host // (ranks.tp * ranks.context), replicate=hosts // each)

    def _trainer_ranks(self, gpus: int) -> Iterator[TrainerRanks]:
        question = self.question
        precision = "fp32" if question.gpu.is_cpu else "bf16"
        base = question.base if question.has_narrow_base else precision
        for tp in question.tensor_sizes() if gpus == 1 or not question.has_narrow_base else ():
            for recompute in RECOMPUTE if gpus % tp == 0 else ():
                for pack in self._packs:
                    alone = TrainerRanks(
                        question.shape, question.gpu, precision, gpus // tp, tp, recompute, pack, 1, question.lora, base
                    )
                    alone = replace(alone, expert=question.expert)
                    for ranks in self._offloading(alone):
                        yield ranks
                        yield from self._sharing_packs(ranks)

    def _offloading(self, ranks: TrainerRanks) -> Iterator[TrainerRanks]:
        """Yield the ranks with their optimizer state on the device, and, where that may be, in host memory. Adapters have
        little of it."""
        yield ranks
        if self.question.offload and not ranks.lora:
            yield replace(ranks, offload=True)

    def _sharing_packs(self, ranks: TrainerRanks) -> Iterator[TrainerRanks]:
        """Yield the same ranks in groups that share packs, inside a host, where one rank cannot hold the longest document:
        the smallest groups that can. It costs time, so larger packs are not shared."""
        while not self.fits(ranks.memory_bytes) and ranks.data % 2 == 0 and ranks.tokens_per_pack == self._packs[0]:
            ranks = replace(ranks, data=ranks.data // 2, context=2 * ranks.context)
            if ranks.context * ranks.tp > self.question.gpu.gpus_per_host:
                return
            if self.fits(ranks.memory_bytes):
                yield ranks

    def least_trainer_bytes(self, gpus: int) -> float:
        return min((ranks.memory_bytes for ranks in self._trainer_ranks(gpus)), default=inf)

    @cached_property
    def _packs(self) -> Sequence[int]:
        """Choices of `tokens_per_pack`; a pack must hold the longest document."""
        longest = -(-self.question.work.longest_document // 128) * 128
        return [longest, *(pack for pack in PACKS if pack > longest)]

    def generators(self, gpus: int, max_staleness: int) -> Iterator[Generators]:
        """Yield every generator layout on `gpus` GPUs; never more slots than answers that can run at once."""
        question, work = self.question, self.question.work
        for tp in question.generator_sizes():
            replicas = gpus // tp
            if gpus % tp or replicas > (max_staleness + 1) * work.groups:
                continue
            wanted = -(-(max_staleness + 1) * work.groups // replicas) * work.samples
            for precision in self._precisions(tp):
                for slots in _slot_choices(wanted, work.samples):
                    yield self._generators(tp, replicas, precision, slots)

    def _precisions(self, tp: int) -> list[str]:
        return [name for name in self.question.precisions if self.question.can_hold(name, tp)]

    def _generators(self, tp: int, replicas: float, precision: str, slots: int) -> Generators:
        question, work = self.question, self.question.work
        replica = Replica(
            question.shape, question.gpu, precision, tp, slots, work.prompt, work.longest_document, question.lora
        )
        replica = replace(replica, expert=question.expert)
        return Generators(replica, replicas, replica.memory_bytes(replica.cached_tokens(work.samples, work.answers)))

    def least_generator_bytes(self, gpus: int) -> float:
        """Least memory per rank of a generator with room for one group."""
        samples, sizes = self.question.work.samples, [tp for tp in self.question.generator_sizes() if gpus % tp == 0]
        options = (self._generators(tp, 1, name, samples) for tp in sizes for name in self._precisions(tp))
        return min(one.memory_bytes for one in options)

    def least_sync_bytes(self) -> float:
        """Least memory of a GPU that a trainer and a generator share."""
        gpus = self.question.gpus
        least = self.least_trainer_bytes(gpus) + self.least_generator_bytes(gpus) - WORKSPACE_BYTES
        shared = self.question.base if self.question.base in self.question.precisions else ""
        return least - (
            weight_bytes(self.question.shape, shared) if self.question.lora and gpus == 1 and shared else 0.0
        )

    def least_async_bytes(self) -> float:
        """Least memory of the fullest GPU over all splits; of one GPU, both roles have a part."""
        if self.question.gpus == 1:
            return self.least_sync_bytes() + WORKSPACE_BYTES
        splits = ((count, self.question.gpus - count) for count in self.splits)
        needs = (max(self.least_trainer_bytes(n), self.least_generator_bytes(m)) for n, m in splits)
        return min(needs, default=inf)

    # Prices

    def fits(self, memory_bytes: float) -> bool:
        return memory_bytes <= self.question.memory_bytes

    def sync_plan(self, trainers: Trainers, generators: Generators) -> Plan:
        """Both roles on all GPUs in turn: generate until the last answer has ended, train, copy the weights."""
        work, gpu = self.question.work, self.question.gpu
        count = work.answers_per_update / generators.replicas
        generate_s = generators.replica.drain_s(count, work.answers_per_update, work.samples, work.answers)
        replica = generators.replica
        published = published_bytes(self.question.shape, wire(replica.precision, replica.shape), self.question.lora)
        weights_s = 2 * copy_s(gpu, published / replica.tp)
        step_s = generate_s + trainers.update_s + weights_s + self._overhead_s()
        return Plan(trainers, generators, True, 0, step_s, "training and generation in turn")

    def async_plan(self, trainers: Trainers, generators: Generators, max_staleness: int) -> Plan:
        """Both roles in parallel. The step takes the longest of three: training; generating with full slots; and the path
        of a batch from admission to published version, divided among the S + 1 batches that may be on it at a time."""
        after_s = trainers.update_s + self._overhead_s()
        terms: dict[Limit, float] = {
            "training": after_s,
            "generation": self.full_s(generators, max_staleness),
            "the longest answers": self._cohorts_s(
                generators, max_staleness, after_s + self._weights_s(trainers, generators)
            ),
        }
        limit = max(terms, key=lambda name: terms[name])
        return Plan(trainers, generators, False, max_staleness, terms[limit], limit)

    def shared_plan(self, trainers: Trainers, generators: Generators, max_staleness: int) -> Plan:
        """Both roles at the same time on one GPU, which they take turns on: the step takes as long as both together, or as
        the longest answers."""
        alone = self.async_plan(trainers, generators, max_staleness)
        busy_s = trainers.update_s + self._overhead_s() + self.full_s(generators, max_staleness)
        limit: Limit = "training and generation in turn" if busy_s >= alone.step_s else alone.limit
        return replace(alone, step_s=max(busy_s, alone.step_s), limit=limit, shares_gpu=True)

    def full_s(self, generators: Generators, max_staleness: int) -> float:
        """Time to generate an update's answers with as many running as slots and places allow. A group holds its place
        until its longest answer has ended; an answer holds its slot only until it has ended itself."""
        work, replica = self.question.work, generators.replica
        each, late = work.answers_per_update / generators.replicas, replica.late_steps
        mean, longest = work.answers.mean + late, work.answers.longest_of(work.samples) + late
        places = min(GENERATOR_AHEAD * replica.slots, (max_staleness + 1) * each)
        active = min(replica.slots, places * mean / longest)
        step_s = replica.steady_step_s(max(1.0, active), work.answers)
        return each * mean / active * step_s + replica.prefill_s(max(1, round(each / work.samples)))

    def _cohorts_s(self, generators: Generators, max_staleness: int, after_s: float) -> float:
        """Time of a step that is limited by the longest answers. An update's answers are admitted together as a cohort, and
        S + 1 cohorts run at a time, each K decode steps younger than the one before. Waiting for slots, the longest answer,
        and what follows it must take at most (S + 1) K steps."""
        answers, cohorts = self.question.work.answers, max_staleness + 1
        longest = answers.longest_of(self.question.work.answers_per_update) + generators.replica.late_steps
        steps = longest / cohorts
        for _ in range(_ROUNDS):
            step_s = self._period_s(generators, steps, cohorts) / steps
            steps = (self._queued_steps(generators, steps, cohorts) + longest + after_s / step_s) / cohorts
        return self._period_s(generators, steps, cohorts)

    def _queued_steps(self, generators: Generators, steps: float, cohorts: int) -> float:
        """Steps that the last answer of a cohort waits for a slot still held by an older cohort."""
        work = self.question.work
        alive = work.answers.share_above(np.arange(cohorts, dtype=np.float64) * steps)
        wanted = float(alive.sum()) * work.answers_per_update / generators.replicas
        return max(0.0, wanted / generators.replica.slots - 1) * (work.answers.mean + generators.replica.late_steps)

    def _period_s(self, generators: Generators, steps: float, cohorts: int) -> float:
        """Time of `steps` decode steps, from one admission to the next, while answers of all cohorts end."""
        work, replica = self.question.work, generators.replica
        each = work.answers_per_update / generators.replicas
        ages = (_MIDDLES[:, None] + np.arange(cohorts)) * steps
        alive = work.answers.share_above(ages) * each
        active, cached = np.clip(alive.sum(axis=1), 1.0, replica.slots), (alive * (work.prompt + ages)).sum(axis=1)
        step_s = float(replica.typical_step_s(active, cached).mean())
        return steps * step_s + replica.prefill_s(max(1, round(work.groups / generators.replicas)))

    def _weights_s(self, trainers: Trainers, generators: Generators) -> float:
        replica = generators.replica
        targets = max(1, round(generators.replicas * replica.tp))
        return sync_s(
            self.question.shape,
            self.question.gpu,
            wire(replica.precision, replica.shape),
            trainers.ranks.ranks,
            targets,
            replica.tp,
            self.question.lora,
        )

    def _overhead_s(self) -> float:
        """Time for messages, records on disk, and the scores of the last group."""
        engine = self.question.gpu.engine
        return engine.update_s + 4 * engine.message_s + self.question.work.samples * engine.score_s


def _slot_choices(wanted: int, samples: int) -> list[int]:
    """Numbers of slots for whole groups: as many as wanted, a half, a quarter and so on."""
    choices, groups = [], wanted // samples
    while groups >= 1:
        choices.append(groups * samples)
        groups //= 2
    return choices


def best(plans: Iterable[Plan]) -> Plan | None:
    """The plan with the lowest price; among equals the one with the least memory, then the first."""
    return min(plans, key=lambda plan: (plan.price, plan.memory_bytes), default=None)


def best_sync(question: Question) -> Plan | None:
    """The best co-located plan. For each generator layout, the fastest trainer that fits beside it is enough."""
    space, found = Space(question), None
    trainers = sorted(space.trainers(question.gpus), key=lambda one: (one.update_s, one.memory_bytes))
    for generators in space.generators(question.gpus, 0):
        for one in trainers:
            if found is not None and one.update_s >= found.step_s:
                break
            if space.fits(both_bytes(one, generators) - WORKSPACE_BYTES):
                found = best([*([found] if found else []), space.sync_plan(one, generators)])
                break
    return found


def best_async(question: Question) -> Plan | None:
    """The best asynchronous plan over all splits of the GPUs; of one GPU, which cannot be split, both roles take a part."""
    return next(iter(near_async(question)), None)


def near_async(question: Question) -> list[Plan]:
    """The best asynchronous plan, and the best ones of some other splits if they are nearly as good, for a simulation to
    choose from: closed forms know how long roles wait for each other on average, if at all."""
    space = Space(question)
    if question.gpus == 1:
        return [plan] if (plan := _best_shared(space)) else []
    found, least = list[Plan](), inf
    for trainer_gpus in space.splits:
        if plan := _best_of_split(space, trainer_gpus, _NEAR * least):
            found.append(plan)
            least = min(least, plan.price)
    chosen = best(found)
    others = [one for one in found if one.price <= _NEAR * least and one is not chosen]
    every = -(-len(others) // (_NEAR_PLANS - 1)) or 1
    return [chosen, *others[::every]] if chosen else []


def _best_of_split(space: Space, trainer_gpus: int, most: float) -> Plan | None:
    """The best plan with so many GPUs for training; None: there is none, or none whose price is at most `most`."""
    trainers = min(space.trainers(trainer_gpus), key=lambda one: (one.update_s, one.memory_bytes), default=None)
    found: Plan | None = None
    if trainers is None:
        return None
    for max_staleness in range(1, space.question.max_staleness + 1):
        for generators in space.generators(space.question.gpus - trainer_gpus, max_staleness):
            bound = min(most, found.price) if found else most
            if not space.fits(generators.memory_bytes) or _hopeless(space, bound, trainers, generators, max_staleness):
                continue
            found = best([*([found] if found else []), space.async_plan(trainers, generators, max_staleness)])
    return found


def _best_shared(space: Space) -> Plan | None:
    trainers = list(space.trainers(1))
    plans = (
        space.shared_plan(one, generators, max_staleness)
        for max_staleness in range(1, space.question.max_staleness + 1)
        for generators in space.generators(1, max_staleness)
        for one in trainers
        if space.fits(both_bytes(one, generators))
    )
    return best(plans)


def with_one_more(question: Question, plan: Plan) -> float:
    """Seconds by which one more GPU would shorten a step, given to the role that gains most."""
    if plan.shares_gpu:
        more = best_async(replace(question, gpus=2))
        return max(0.0, plan.step_s - more.step_s) if more else 0.0
    space, ranks, generators = Space(question), plan.trainers.ranks, plan.generators
    more_t = Trainers(ranks, plan.trainers.update_s * ranks.ranks / (ranks.ranks + 1), plan.trainers.memory_bytes)
    more_g = Generators(generators.replica, generators.replicas + 1 / generators.replica.tp, generators.memory_bytes)
    if plan.colocated:
        return plan.step_s - space.sync_plan(more_t, more_g).step_s
    either = [(more_t, generators), (plan.trainers, more_g)]
    return max(0.0, plan.step_s - min(space.async_plan(*one, plan.max_staleness).step_s for one in either))


def _hopeless(space: Space, bound: float, trainers: Trainers, generators: Generators, max_staleness: int) -> bool:
    """Whether two of the three terms alone already cost more than this price."""
    least_s = max(trainers.update_s, space.full_s(generators, max_staleness))
    return priced(least_s, max_staleness) > bound
