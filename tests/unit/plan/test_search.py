"""The planner's choice is that of trying everything; more resources never hurt; if nothing fits, it suggests what would."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from msgspec.structs import replace

from llamarl.model_spec import SHAPES, shape_named
from llamarl.plan import search
from llamarl.plan.advice import why_nothing_fits
from llamarl.plan.gpus import GPUS
from llamarl.plan.lengths import Lengths
from llamarl.plan.search import Plan, Space, Trainers, best, best_async, best_sync, near_async
from llamarl.plan.workload import Question, Workload
from llamarl.simulate.rehearse import rehearse, rehearse_best

MODELS = ["smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-8b"]


def question(
    model: str = "llama-3.1-8b", gpus: int = 16, gpu: str = "h100", groups: int = 64, max_staleness: int = 1
) -> Question:
    work = Workload(groups=groups, samples=8, prompt=256, answers=Lengths("lognormal:median=400,sigma=0.8,max=4096"))
    return Question(shape=shape_named(model), gpu=GPUS[gpu], gpus=gpus, work=work, max_staleness=max_staleness)


def random_question(seed: int) -> Question:
    chance = Random(seed)
    median = chance.choice([50, 300, 900])
    work = Workload(
        groups=chance.choice([4, 32, 200]),
        samples=chance.choice([2, 4, 8]),
        prompt=chance.choice([32, 512]),
        answers=Lengths(f"lognormal:median={median},sigma={chance.choice([0.3, 1.0])},max={4 * median}"),
    )
    gpu = chance.choice(list(GPUS.values()))
    precisions = ("bf16", "fp8") if gpu.tflops.fp8 and chance.random() < 0.5 else ("bf16",)
    return Question(
        shape=SHAPES[chance.choice(MODELS)],
        gpu=gpu,
        gpus=chance.randint(1, 4),
        work=work,
        max_staleness=chance.randint(1, 2),
        precisions=precisions,
    )


def every_sync(asked: Question) -> Iterator[Plan]:
    space = Space(asked)
    for trainers in space.trainers(asked.gpus):
        for generators in space.generators(asked.gpus, 0):
            plan = space.sync_plan(trainers, generators)
            if space.fits(plan.memory_bytes):
                yield plan


def every_async(asked: Question) -> Iterator[Plan]:
    space = Space(asked)
    if asked.gpus == 1:
        yield from every_shared(asked)
    for trainer_gpus in range(1, asked.gpus):
        for trainers in space.trainers(trainer_gpus):
            for staleness in range(1, asked.max_staleness + 1):
                for generators in space.generators(asked.gpus - trainer_gpus, staleness):
                    plan = space.async_plan(trainers, generators, staleness)
                    if space.fits(plan.memory_bytes):
                        yield plan


def every_shared(asked: Question) -> Iterator[Plan]:
    space = Space(asked)
    for trainers in space.trainers(1):
        for staleness in range(1, asked.max_staleness + 1):
            for generators in space.generators(1, staleness):
                plan = space.shared_plan(trainers, generators, staleness)
                if space.fits(plan.memory_bytes):
                    yield plan


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_the_choice_is_that_of_brute_force(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PACKS", (16_384,))  # fewer options, but the same decisions
    for seed in range(first, first + 25):
        asked = random_question(seed)
        for chosen, every in ((best_sync(asked), every_sync(asked)), (best_async(asked), every_async(asked))):
            wanted = best(every)
            assert (chosen is None) == (wanted is None), seed
            if chosen is not None and wanted is not None:
                assert chosen.price == pytest.approx(wanted.price, rel=1e-12), seed


def test_a_simulation_chooses_among_splits_that_are_nearly_as_good() -> None:
    """By closed form, 24 GPUs for training are best; with 32, whose trainer waits as long, an update takes a fifth less."""
    answers = Lengths("lognormal:median=800,sigma=1,max=8192")
    work = Workload(groups=256, samples=8, prompt=512, answers=answers, share_prompts=False)
    asked = Question(shape=SHAPES["llama-3.1-8b"], gpu=GPUS["h200"], gpus=64, work=work, max_staleness=4)
    plans = near_async(asked)
    assert plans[0] == best_async(asked) and 1 < len(plans) <= 3
    assert all(one.price <= 1.05 * plans[0].price for one in plans)
    assert len({one.trainers.ranks.ranks for one in plans}) == len(plans)
    chosen = rehearse_best(plans, asked)
    assert chosen and chosen.price == min(rehearse(one, asked).price for one in plans)
    assert chosen.step_s < 0.85 * rehearse(plans[0], asked).step_s


def step_s(asked: Question) -> float:
    found = best_async(asked)
    assert found is not None
    return found.step_s


def test_more_gpus_are_never_slower() -> None:
    times = [step_s(question(gpus=gpus)) for gpus in (8, 16, 32, 128)]
    assert times == sorted(times, reverse=True)


def test_faster_gpus_are_never_slower() -> None:
    assert step_s(question(gpu="b200")) < step_s(question(gpu="h200")) <= step_s(question(gpu="h100"))
    assert step_s(question(gpu="h100")) < step_s(question(gpu="a100"))


def test_more_staleness_is_never_slower_and_is_taken_only_where_it_pays() -> None:
    plans = [best_async(question(max_staleness=limit)) for limit in (1, 2, 4)]
    prices = [plan.price for plan in plans if plan is not None]
    assert len(prices) == 3
    assert prices == sorted(prices, reverse=True)


def test_longer_answers_take_longer() -> None:
    asked = question()
    longer = replace(asked, work=replace(asked.work, answers=Lengths("lognormal:median=800,sigma=0.8,max=8192")))
    assert step_s(longer) > step_s(asked)


def fastest_trainer(asked: Question, gpus: int, *, replicas: bool) -> Trainers:
    space = Space(asked)
    fitting = [one for one in space.trainers(gpus) if space.fits(one.memory_bytes)]
    return min((one for one in fitting if replicas or one.ranks.replicate == 1), key=lambda one: one.update_s)


def test_replicas_are_taken_where_sharding_over_all_hosts_costs_too_much() -> None:
    """Gathering the weights over the network in every pass takes longer than computing. On one host, or over a network as
    fast as a host's own links, it does not."""
    asked = question(gpus=256, groups=64)
    chosen, sharded = (fastest_trainer(asked, 128, replicas=allowed) for allowed in (True, False))
    assert chosen.update_s < 0.95 * sharded.update_s
    ranks = chosen.ranks
    assert (ranks.replicate, ranks.data * ranks.tp, ranks.ranks) == (16, 8, 128), "a replica for each host"
    assert chosen.memory_bytes > replace(ranks, replicate=1, data=16 * ranks.data).memory_bytes
    slow = question(gpus=256, groups=64)
    slow = replace(slow, gpu=replace(slow.gpu, nic_gb_s=1.0))
    assert fastest_trainer(slow, 128, replicas=True).update_s > chosen.update_s, "their all-reduce has its price"
    fast = replace(asked, gpu=replace(asked.gpu, nic_gb_s=400.0))
    for easy in (fast, question(gpus=16, groups=64)):
        assert fastest_trainer(easy, easy.gpus // 2, replicas=True).ranks.replicate == 1


def test_ranks_share_packs_only_where_one_cannot_hold_the_longest_sequence() -> None:
    """The fewest ranks that can, on one host."""
    for answer, shared in ((1000, False), (130_000, True)):
        asked = question("llama-3.1-8b", gpus=16)
        asked = replace(asked, work=replace(asked.work, answers=Lengths(f"fixed:{answer}")))
        space = Space(asked)
        found = [one.ranks for one in space.trainers(8) if space.fits(one.memory_bytes)]
        assert any(one.context > 1 for one in found) == shared, answer
        assert all(one.data * one.context * one.tp == 8 for one in found)
        for one in found:
            fewer = replace(one, data=2 * one.data, context=one.context // 2)
            assert one.context == 1 or not space.fits(fewer.memory_bytes)


def test_no_plan_takes_more_memory_than_there_is() -> None:
    for asked in map(random_question, range(40)):
        for found in (best_sync(asked), best_async(asked)):
            assert found is None or found.memory_bytes <= asked.gpu.memory_bytes


def test_what_does_not_fit_is_told_with_what_would() -> None:
    asked = replace(question("llama-3.1-405b", gpus=1024), work=replace(question().work, prompt=512))
    assert best_sync(asked) is None
    assert best_async(asked) is None
    told = why_nothing_fits(asked)
    assert "generating 100 GiB" in told, "95 for the weights, the rest for the cache, activations and CUDA"
    assert "1024 h200" in told
    assert best_async(replace(asked, gpu=GPUS["h200"])) is not None
    assert why_nothing_fits(question("llama-3.1-70b", gpus=8)).endswith("; 24 GPUs")
    assert (
        best_sync(question("llama-3.1-70b", gpus=16)) is None and best_async(question("llama-3.1-70b", gpus=16)) is None
    )
    assert best_async(question("llama-3.1-70b", gpus=24)) is not None
