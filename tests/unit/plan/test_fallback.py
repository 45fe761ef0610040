"""Where nothing fits as asked, the planner tries fp8 and two hosts, says why, and never overrides the user."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamarl.errors import InputError
from llamarl.model_spec import SHAPES, shape_named
from llamarl.plan.advice import why_nothing_fits
from llamarl.plan.fallback import async_plan, sync_plan, widened
from llamarl.plan.gpus import GPUS, Gpu
from llamarl.plan.jobfile import job_settings
from llamarl.plan.lengths import Lengths
from llamarl.plan.search import Space, best_async, best_sync
from llamarl.plan.trainer import TrainerRanks
from llamarl.plan.workload import Question, Workload

H100 = GPUS["h100"]
SMALL_HOSTS: Gpu = replace(H100, gpus_per_host=4)


def question(
    model: str = "llama-3.1-405b",
    *,
    gpus: int = 512,
    gpu: Gpu = H100,
    groups: int = 128,
    fallbacks: tuple[str, ...] = ("fp8",),
) -> Question:
    work = Workload(groups=groups, samples=8, prompt=256, answers=Lengths("lognormal:median=400,sigma=0.8,max=4096"))
    return Question(shape=shape_named(model), gpu=gpu, gpus=gpus, work=work, fallbacks=fallbacks)


def test_fp8_is_taken_where_bf16_does_not_fit_and_the_reason_is_told() -> None:
    asked = question()
    assert best_async(asked) is None
    plan = async_plan(asked)
    assert plan is not None
    assert plan.can_be_built
    assert (plan.generators.replica.precision, plan.generators.replica.tp) == ("fp8", 8)
    assert plan.memory_bytes <= asked.memory_bytes
    assert plan.note.startswith("generators in fp8: bf16 inside a host would need 9")
    assert plan.note.endswith("GiB of 75")


def test_a_replica_spans_two_hosts_where_one_is_too_small() -> None:
    plan = async_plan(question(gpu=SMALL_HOSTS))
    assert plan is not None
    assert plan.can_be_built
    assert plan.generators.replica.tp == 8
    assert "over 2 hosts: bf16 inside a host would need" in plan.note


def test_optimizer_state_goes_to_host_memory_only_where_nothing_else_fits() -> None:
    asked = question("llama-3.1-8b", gpus=1, gpu=GPUS["h200"], groups=8)
    assert best_async(widened(asked)) is None and best_sync(widened(asked)) is None
    for plan in (async_plan(asked), sync_plan(asked)):
        assert plan is not None and plan.trainers.ranks.offload
        assert plan.note.startswith("optimizer state in host memory (75 GiB for each GPU), generators in ")
        assert job_settings(plan, asked)["trainer"]["offload"] is True
    more = async_plan(question("llama-3.1-8b", gpus=8, groups=8))
    assert (
        more is not None and not more.trainers.ranks.offload and "offload" not in job_settings(more, asked)["trainer"]
    )


def test_an_update_with_its_state_in_host_memory_takes_as_long_as_measured() -> None:
    """Claim 11: 8.19B, 16 x 4 answers of 256 tokens, prompts of 64, all blocks computed again."""
    ranks = TrainerRanks(shape_named("qwen3-8b"), GPUS["h200"], "bf16", 1, 1, "full", 8192, offload=True)
    work = Workload(groups=16, samples=4, prompt=64, answers=Lengths("fixed:256"), share_prompts=False)
    assert ranks.update_s(work.batch(ranks.gpu)) == pytest.approx(4.3, rel=0.15)


def test_a_precision_that_the_user_chose_is_kept() -> None:
    asked = question(fallbacks=())
    assert async_plan(asked) is None
    baseline = sync_plan(asked)
    assert baseline is not None
    assert baseline.generators.replica.precision == "bf16"
    assert "generators in fp8" in why_nothing_fits(widened(asked))


def test_the_baseline_spans_many_hosts_and_is_told_apart_from_what_can_be_built() -> None:
    asked = question(fallbacks=())
    plan = sync_plan(asked)
    assert plan is not None
    assert plan.colocated
    assert not plan.can_be_built
    assert plan.generators.replica.tp > 2 * H100.gpus_per_host
    assert plan.memory_bytes <= asked.memory_bytes
    assert "beside the trainer. Only a baseline" in plan.note
    assert f"{plan.generators.replica.tp} ranks cannot share 8 key-value heads" in plan.note


@pytest.mark.parametrize(("model", "gpus"), [("llama-3.1-8b", 8), ("llama-3.1-70b", 64), ("qwen2.5-1.5b", 1)])
def test_what_fits_as_asked_is_left_alone(model: str, gpus: int) -> None:
    asked = question(model, gpus=gpus)
    assert sync_plan(asked) == best_sync(asked)
    assert async_plan(asked) == best_async(asked)


def test_nothing_is_widened_where_memory_is_not_what_is_missing() -> None:
    asked = question("llama-3.1-8b", gpus=64, groups=4)
    assert best_sync(asked) is None, "8 replicas, but only 4 groups"
    assert sync_plan(asked) is None


@pytest.mark.parametrize("name", SHAPES)
def test_every_layout_that_is_offered_divides_the_model(name: str) -> None:
    shape = replace(shape_named(name), max_positions=131_072)  # some models are too short for the question's answers
    asked = widened(replace(question("llama-3.1-8b", gpus=16, groups=64), shape=shape))
    for generators in Space(asked).generators(16, 1):
        tp = generators.replica.tp
        assert tp <= 16
        assert not any(size % tp for size in (asked.shape.num_kv_heads, asked.shape.intermediate_size))
    for trainers in Space(asked).trainers(16):
        assert asked.shape.splits_over(trainers.ranks.tp)
        assert trainers.ranks.tp <= H100.gpus_per_host


def test_fp8_is_offered_only_for_sizes_that_fp8_products_have() -> None:
    odd = replace(shape_named("llama-3.2-1b"), intermediate_size=8200)
    asked = replace(question("llama-3.2-1b", gpus=4), shape=odd)
    assert widened(asked).precisions == ("bf16",)
    with pytest.raises(InputError, match="--precision fp8: the model has matrices whose sizes are no multiples of 16"):
        replace(asked, precisions=("fp8",))
    even = replace(odd, intermediate_size=8 * 1000)  # 4 ranks have 2000 each, 8 ranks 1000
    found = Space(replace(asked, shape=even, precisions=("fp8",))).generators(8, 1)
    assert {generators.replica.tp for generators in found} == {1, 2, 4}
