"""The theorem on random cost functions: async is never slower, strictly faster where its assumptions hold, and equal where
they fail."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from llamarl.plan.theory import (
    Costs,
    Eta,
    async_optimum,
    async_step_s,
    sync_optimum,
    sync_step_s,
    theta_star,
)

BATCHES = [2**power for power in range(12)]
SIZES = [2**power for power in range(8)]


def eta(chance: Random, *, falls: bool = True) -> Eta:
    """GPU-seconds per sample: a part that a larger batch shares, a part that it does not, and a part that grows with m."""
    shared = chance.uniform(0.5, 20) if falls else 0.0
    own, exchange = chance.uniform(0.05, 2), chance.uniform(0.0, 0.5)
    return lambda b, m: (own + shared / b) * (1 + exchange * (m - 1))


def costs(chance: Random, *, falls: bool = True) -> Costs:
    weights = chance.uniform(5, 900)
    return Costs(
        samples=chance.randint(64, 4096),
        gpus=chance.choice([8, 64, 1024]),
        memory=80,
        weights=weights,
        state=8 * weights,
        activations=chance.uniform(0.1, 8),
        cache=chance.uniform(0.1, 8),
        eta_t=eta(chance, falls=falls),
        eta_g=eta(chance, falls=falls),
    )


@pytest.mark.parametrize("seed", range(300))
def test_async_is_never_slower_and_strictly_faster_where_memory_binds(seed: int) -> None:
    found = costs(Random(seed))
    sync, split = sync_optimum(found, BATCHES, SIZES), async_optimum(found, BATCHES, SIZES)
    if sync is None:
        return
    assert split is not None, "what fits together fits apart"
    assert split.step_s <= sync.step_s * (1 + 1e-12)
    # Only memory kept the batches from growing; with the roles apart, there is room.
    grows = [2 * sync.b_t, 2 * sync.b_g]
    room_t = found.trainer_fits(grows[0], sync.m) and grows[0] in BATCHES
    room_g = found.generator_fits(grows[1], sync.m) and grows[1] in BATCHES
    if room_t or room_g:
        assert split.step_s < sync.step_s


@pytest.mark.parametrize("seed", range(100))
def test_without_gain_from_larger_batches_or_smaller_copies_both_are_equal(seed: int) -> None:
    found = costs(Random(seed), falls=False)
    flat = replace(found, eta_t=lambda b, m: found.eta_t(1, 1), eta_g=lambda b, m: found.eta_g(1, 1))
    sync, split = sync_optimum(flat, BATCHES, SIZES), async_optimum(flat, BATCHES, SIZES)
    if sync is not None:
        assert split is not None
        assert split.step_s == pytest.approx(sync.step_s, rel=1e-12)


@pytest.mark.parametrize("seed", range(100))
def test_the_best_share_is_theta_star_and_there_both_steps_are_equal(seed: int) -> None:
    chance = Random(seed)
    found, eta_t, eta_g = costs(chance), chance.uniform(0.1, 9), chance.uniform(0.1, 9)
    best = theta_star(eta_t, eta_g)
    least = async_step_s(found, eta_t, eta_g, best)
    assert least == pytest.approx(sync_step_s(found, eta_t, eta_g), rel=1e-12)
    for theta in (best * 0.9, best + 0.1 * (1 - best), chance.uniform(0.01, 0.99)):
        assert async_step_s(found, eta_t, eta_g, theta) >= least * (1 - 1e-12)


def test_the_gain_grows_with_the_model() -> None:
    """With a larger state at the same costs, the synchronous copy needs more GPUs, but the generator's does not."""
    gains = []
    for weights in (2, 16, 140):
        one = Costs(
            samples=2048, gpus=256, memory=80, weights=weights, state=8 * weights, activations=1.0, cache=1.0,
            eta_t=lambda b, m: (1 + 4 / b) * (1 + 0.05 * (m - 1)), eta_g=lambda b, m: (1 + 16 / b) * (1 + 0.05 * (m - 1)),
        )  # fmt: skip
        sync, split = sync_optimum(one, BATCHES, SIZES), async_optimum(one, BATCHES, SIZES)
        assert sync is not None
        assert split is not None
        gains.append(sync.step_s / split.step_s)
    assert gains == sorted(gains)
    assert gains[-1] > gains[0]
