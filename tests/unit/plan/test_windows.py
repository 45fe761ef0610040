"""The planner counts attention only as far as a layer's window goes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamarl.model_spec import ModelSpec, shape_named
from llamarl.plan.generator import Replica
from llamarl.plan.gpus import gpu_named
from llamarl.plan.lengths import Lengths
from llamarl.plan.terms import prefill_s, seen_square
from llamarl.plan.trainer import packed
from llamarl.plan.workload import Workload
from llamarl.simulate.answers import Answers
from llamarl.simulate.decoding import Decoding

H200, WHOLE = gpu_named("h200"), shape_named("llama-3.2-1b")


def with_windows(*windows: int) -> ModelSpec:
    return replace(WHOLE, windows=windows * (WHOLE.num_layers // len(windows)))


@pytest.mark.parametrize(("length", "window"), [(700, 300), (300, 300), (200, 300), (900, 90)])
def test_pairs_that_see_each_other_are_counted_one_by_one(length: int, window: int) -> None:
    pairs = sum(1 for query in range(length) for key in range(query + 1) if key > query - window)
    assert seen_square(length, (window,)) / 2 == pytest.approx(pairs, rel=0.01)
    assert seen_square(length, (window, 0)) == (seen_square(length, (window,)) + length**2) / 2


def test_planned_and_simulated_updates_see_the_same() -> None:
    work = Workload(groups=4, samples=8, prompt=100, answers=Lengths("fixed:900"))
    windows = with_windows(256, 0).windows
    planned, whole = work.batch(H200, windows), work.batch(H200)
    assert planned.squares == pytest.approx(packed(H200, [1000.0] * 32, 0.9, windows).squares)
    simulated = Answers(work.answers, samples=8, prompt=100, seed=0, windows=windows).batch(H200, (0, 1, 2, 3))
    assert simulated.squares == pytest.approx(planned.squares) and planned.squares < 0.8 * whole.squares


def replica(shape: ModelSpec) -> Replica:
    return Replica(shape, H200, "bf16", 1, 64, 100, 8192)


def test_a_decode_step_reads_no_more_than_the_window() -> None:
    plain, narrow = replica(WHOLE), replica(with_windows(512))
    assert narrow.step_s(64, 64 * 500) == plain.step_s(64, 64 * 500)
    assert narrow.step_s(64, 64 * 4000) == pytest.approx(plain.step_s(64, 64 * 512))
    assert narrow.growth_s(64, 64 * 500) == plain.growth_s(64, 64 * 500) > narrow.growth_s(64, 64 * 600) == 0
    times = []
    for one in (plain, narrow):
        decoding = Decoding(one)
        decoding.start(0, list(range(1000, 4200, 50)))
        times.append(decoding.due_s())
    assert times[1] < 0.97 * times[0]


def test_a_long_prompt_is_read_faster_through_windows() -> None:
    assert prefill_s(with_windows(512), H200, "bf16", 4, 8192) < 0.8 * prefill_s(WHOLE, H200, "bf16", 4, 8192)
