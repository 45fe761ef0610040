"""The planner counts a prompt once for all its answers, as the trainer's packs do."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from llamarl.algo.batch import Document
from llamarl.model_spec import shape_named
from llamarl.plan.gpus import gpu_named
from llamarl.plan.lengths import Lengths
from llamarl.plan.trainer import LEAST_SHARED, TrainerRanks, packed, shared_prompts
from llamarl.plan.workload import Workload
from llamarl.train.packing import Sharing, make_packs

H200 = gpu_named("h200")
WORK = Workload(groups=4, samples=8, prompt=120, answers=Lengths("fixed:200"), share_prompts=True)


def documents() -> list[Document]:
    rng, found = np.random.default_rng(0), []
    for _ in range(WORK.groups):
        prompt = rng.integers(0, 1000, WORK.prompt)
        for sample in range(WORK.samples):
            tokens = np.concatenate([prompt, [sample], rng.integers(0, 1000, 199)]).astype(np.int32)
            zeros = np.zeros(200, np.float32)
            found.append(Document(tokens, WORK.prompt, zeros, zeros.astype(np.int64), zeros))
    return found


@pytest.mark.parametrize("budget", [16_384, 1000, 600, 330])
def test_what_the_planner_counts_is_what_packs_hold(budget: int) -> None:
    """Also where a group is larger than a pack, and its prompt is in several of them."""
    load = WORK.batch(H200).computed(budget)
    packs = make_packs(documents(), budget, long_rows=True, sharing=Sharing("on"))
    assert load.tokens == pytest.approx(sum(sum(pack.lengths) for pack in packs), rel=0.04)
    assert load.squares == pytest.approx(sum(node.squares for pack in packs for node in pack.nodes), rel=0.04)


def test_single_answers_short_prompts_and_cpus_share_nothing() -> None:
    assert shared_prompts(H200, 4, LEAST_SHARED, 8) is not None
    assert shared_prompts(H200, 4, LEAST_SHARED - 1, 8) is None
    assert shared_prompts(H200, 4, 500, 1) is None
    assert shared_prompts(replace(H200, cores=8), 4, 500, 8) is None


def test_an_update_is_faster_by_the_tokens_that_it_does_not_compute() -> None:
    trainer = TrainerRanks(shape_named("llama-3.2-1b"), H200, "bf16", 1, 1, "none", 16_384)
    many = replace(WORK, groups=64)
    plain_s = trainer.update_s(replace(many, share_prompts=False).batch(H200))
    assert plain_s == trainer.update_s(packed(H200, [320.0] * 512, 200 / 320))
    # 1.49 times fewer tokens; the head and the joins take as long as before
    assert 1.25 < plain_s / trainer.update_s(many.batch(H200)) < 1.49
