"""The planner counts a prompt once for all its answers, as the trainer's packs do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from llamarl.algo.batch import Document
from llamarl.model_spec import shape_named
from llamarl.plan.gpus import gpu_named
from llamarl.plan.lengths import Lengths
from llamarl.plan.trainer import LEAST_SHARED, TrainerRanks, packed, shared_prompts
from llamarl.plan.workload import Workload
from llamarl.simulate.answers import Answers
from llamarl.train.packing import Sharing, make_packs
from llamarl.train.policy import ComputeSettings, sharing_of

H200 = gpu_named("h200")
CPU = replace(H200, cores=8)
WORK = Workload(groups=4, samples=8, prompt=120, answers=Lengths("fixed:200"), share_prompts=True)


def drawn(work: Workload) -> Answers:
    return Answers(work.answers, samples=work.samples, prompt=work.prompt, seed=0, share_prompts=work.share_prompts)


def documents(work: Workload) -> list[Document]:
    rng, found = np.random.default_rng(0), []
    for ordinal in range(work.groups):
        prompt = rng.integers(0, 1000, work.prompt)
        for sample, answer in enumerate(drawn(work).of(ordinal)):
            tokens = np.concatenate([prompt, [sample], rng.integers(0, 1000, answer - 1)]).astype(np.int32)
            zeros = np.zeros(answer, np.float32)
            found.append(Document(tokens, work.prompt, zeros, zeros.astype(np.int64), zeros))
    return found


@pytest.mark.parametrize("budget", [16_384, 1000, 600, 330])
def test_what_the_planner_counts_is_what_packs_hold(budget: int) -> None:
    """Also where a group is larger than a pack, and its prompt is in several of them."""
    load = WORK.batch(H200).computed(budget)
    packs = make_packs(documents(WORK), budget, long_rows=True, sharing=Sharing("on"))
    assert load.tokens == pytest.approx(sum(sum(pack.lengths) for pack in packs), rel=0.04)
    assert load.squares == pytest.approx(sum(node.squares for pack in packs for node in pack.nodes), rel=0.04)


def test_single_answers_and_short_prompts_share_nothing_on_a_gpu() -> None:
    assert shared_prompts(H200, 4, LEAST_SHARED, 8) is not None
    assert shared_prompts(H200, 4, LEAST_SHARED - 1, 8) is None
    assert shared_prompts(H200, 4, 500, 1) is None
    assert shared_prompts(CPU, 4, 500, 8) is None, "rows of a CPU hold whole trees"


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [(6, "fixed:4"), (24, "fixed:8"), (120, "fixed:200"), (8, "fixed:60"), (6, "lognormal:median=13,sigma=0.5,max=16")],
)
def test_on_a_cpu_the_planner_counts_the_rows_that_packs_hold(prompt: int, answers: str) -> None:
    work = replace(WORK, groups=16, prompt=prompt, answers=Lengths(answers))
    shape = shape_named("llama-3.2-1b")
    sharing = sharing_of(shape, ComputeSettings(torch.device("cpu"), torch.float32, share_prompts="auto"))
    assert sharing.least == 1
    packs = make_packs(documents(work), 16_384, long_rows=False, sharing=sharing)
    computed = TrainerRanks(shape, CPU, "fp32", 1, 1, "none", 16_384).computed(work.batch(CPU))
    assert computed.tokens == pytest.approx(sum(pack.tokens_RT.numel() for pack in packs), rel=0.15)
    simulated = TrainerRanks(shape, CPU, "fp32", 1, 1, "none", 16_384).computed(
        drawn(work).batch(CPU, tuple(range(16)))
    )
    assert simulated.tokens == pytest.approx(computed.tokens, rel=0.05)
    plain = replace(work, share_prompts=False).batch(CPU)
    assert not plain.in_trees and plain.tokens > computed.tokens


def test_an_update_is_faster_by_the_tokens_that_it_does_not_compute() -> None:
    trainer = TrainerRanks(shape_named("llama-3.2-1b"), H200, "bf16", 1, 1, "none", 16_384)
    many = replace(WORK, groups=64)
    plain_s = trainer.update_s(replace(many, share_prompts=False).batch(H200))
    assert plain_s == trainer.update_s(packed(H200, [320.0] * 512, 200 / 320))
    # 1.49 times fewer tokens; the head and the joins take as long as before
    assert 1.25 < plain_s / trainer.update_s(many.batch(H200)) < 1.49
