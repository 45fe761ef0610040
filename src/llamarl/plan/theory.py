"""The paper's theorem as code: the best synchronous and the best asynchronous step for given cost functions.

A step has B0 samples on G0 GPUs of M0 bytes. A copy of the policy takes m GPUs and works on b samples at once; eta_t(b, m)
and eta_g(b, m) are GPU-seconds per sample for training and generation, decreasing in b and nondecreasing in m. The proof is
in docs/theory.md. Minima are over finite sets of b and m, as in practice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

Eta = Callable[[float, float], float]  # (samples at once, GPUs per copy) -> GPU-seconds per sample


class Costs(Struct, frozen=True, kw_only=True):
    """The theorem's inputs, with the paper's symbols."""

    samples: float  # B0: samples per step
    gpus: float  # G0
    memory: float  # M0: memory of one GPU
    weights: float  # W0
    state: float  # S_t: weights, gradients and optimizer of the trainer
    activations: float  # A_t: activations of one sample
    cache: float  # K_g: cache of one sample
    eta_t: Eta
    eta_g: Eta

    def sync_fits(self, b_t: float, b_g: float, m: float) -> bool:
        """Whether both roles fit together on the same m GPUs."""
        held = self.state + self.activations * b_t + self.weights + self.cache * b_g
        return held / m <= self.memory

    def trainer_fits(self, b: float, m: float) -> bool:
        return (self.state + self.activations * b) / m <= self.memory

    def generator_fits(self, b: float, m: float) -> bool:
        return (self.weights + self.cache * b) / m <= self.memory


class SyncPoint(Struct, frozen=True):
    """A synchronous step: its time, and its choice of m and b."""

    step_s: float
    m: float
    b_t: float
    b_g: float


class AsyncPoint(Struct, frozen=True):
    """An asynchronous step: its time, its split of the GPUs, and its choice of m and b for each role."""

    step_s: float
    theta: float  # share of the GPUs that train
    m_t: float
    b_t: float
    m_g: float
    b_g: float


def theta_star(eta_t: float, eta_g: float) -> float:
    """Share of the GPUs for training at which both roles take equally long."""
    return eta_t / (eta_t + eta_g)


def sync_step_s(costs: Costs, eta_t: float, eta_g: float) -> float:
    """Time of a step with both roles in turn, each on all GPUs."""
    return costs.samples / costs.gpus * (eta_t + eta_g)


def async_step_s(costs: Costs, eta_t: float, eta_g: float, theta: float) -> float:
    """Time of a step with both roles in parallel, each on its share of the GPUs."""
    return max(
        costs.samples * eta_t / (theta * costs.gpus),
        costs.samples * eta_g / ((1 - theta) * costs.gpus),
    )


def sync_optimum(costs: Costs, batches: Sequence[float], sizes: Sequence[float]) -> SyncPoint | None:
    """The fastest synchronous step; None if nothing fits."""
    found = [
        SyncPoint(sync_step_s(costs, costs.eta_t(b_t, m), costs.eta_g(b_g, m)), m, b_t, b_g)
        for m in sizes
        for b_t in batches
        for b_g in batches
        if costs.sync_fits(b_t, b_g, m)
    ]
    return min(found, key=lambda point: point.step_s, default=None)


def async_optimum(costs: Costs, batches: Sequence[float], sizes: Sequence[float]) -> AsyncPoint | None:
    """The fastest asynchronous step; None if nothing fits. The best split is theta* for any b and m, so each role can be
    optimized on its own."""
    trainer = _cheapest(costs.eta_t, costs.trainer_fits, batches, sizes)
    generator = _cheapest(costs.eta_g, costs.generator_fits, batches, sizes)
    if trainer is None or generator is None:
        return None
    theta = theta_star(trainer[0], generator[0])
    return AsyncPoint(async_step_s(costs, trainer[0], generator[0], theta), theta, *trainer[1:], *generator[1:])


def _cheapest(
    eta: Eta, fits: Callable[[float, float], bool], batches: Iterable[float], sizes: Sequence[float]
) -> tuple[float, float, float] | None:
    """The cheapest option that fits, as (GPU-seconds per sample, m, b)."""

    def options() -> Iterator[tuple[float, float, float]]:
        yield from ((eta(b, m), m, b) for b in batches for m in sizes if fits(b, m))

    return min(options(), default=None)
