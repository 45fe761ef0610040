"""Every loss against its formula written naively: token by token, answer by answer, in Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llamarl.algo.batch import TokenBatch
from llamarl.algo.losses import LOSSES, REFERENCE_LOGPROBS, aipo_loss, is_tokenwise, kl_estimate, objective
from llamarl.config import AlgoConfig

ALGO = AlgoConfig(rho=3.0, clip_low=0.3, clip_high=0.4, cispo_high=1.5, gspo_low=0.2, gspo_high=0.25)
LENGTHS = [3, 1, 5, 2]


def random_tokens(seed: int) -> TokenBatch:
    """Four answers whose ratios lie on both sides of every clip."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    policy = torch.randn(count, generator=generator, dtype=torch.float64) - 2
    behavior = policy + 1.5 * torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    sequence = torch.tensor([7, 2, 9, 4]).repeat_interleave(torch.tensor(LENGTHS))
    return TokenBatch(
        policy.requires_grad_(),
        behavior,
        advantages.repeat_interleave(torch.tensor(LENGTHS)),
        sequence,
        entropy_N=torch.rand(count, generator=generator, dtype=torch.float64).requires_grad_(),
        num_tokens=2 * count,  # as if as many tokens again lay in other parts of the update
        num_sequences=2 * len(LENGTHS),
        columns={REFERENCE_LOGPROBS: policy.detach() + torch.randn(count, generator=generator, dtype=torch.float64)},
    )


def each_token(term: Callable[[float, float], float]) -> Callable[[TokenBatch], float]:
    """Minus the sum of term(ratio, advantage) over tokens."""

    def loss(tokens: TokenBatch) -> float:
        policy, behavior = tokens.policy_logprobs_N.tolist(), tokens.behavior_logprobs_N.tolist()
        ratios = [math.exp(p - b) for p, b in zip(policy, behavior, strict=True)]
        return -sum(map(term, ratios, tokens.advantages_N.tolist())) / tokens.num_tokens

    return loss


def weighted(weight: Callable[[float], float]) -> Callable[[TokenBatch], float]:
    """Minus the sum of weight(ratio) * advantage * log pi, the weight a constant."""

    def loss(tokens: TokenBatch) -> float:
        policy, behavior = tokens.policy_logprobs_N.tolist(), tokens.behavior_logprobs_N.tolist()
        terms = [
            weight(math.exp(p - b)) * a * p
            for p, b, a in zip(policy, behavior, tokens.advantages_N.tolist(), strict=True)
        ]
        return -float(sum(terms)) / tokens.num_tokens

    return loss


def naive_gspo(tokens: TokenBatch) -> float:
    total, start = 0.0, 0
    for length in LENGTHS:
        part = slice(start, start + length)
        logs = (tokens.policy_logprobs_N[part] - tokens.behavior_logprobs_N[part]).tolist()
        ratio, advantage = math.exp(sum(logs) / length), tokens.advantages_N[start].item()
        total += min(ratio * advantage, min(max(ratio, 1 - 0.2), 1 + 0.25) * advantage)
        start += length
    return -total / tokens.num_sequences


def clip(ratio: float) -> float:
    return min(max(ratio, 1 - 0.3), 1 + 0.4)


NAIVE: dict[str, Callable[[TokenBatch], float]] = {
    "aipo": weighted(lambda ratio: min(ratio, 3.0)),
    "reinforce": weighted(lambda ratio: 1.0),
    "rloo": weighted(lambda ratio: 1.0),
    "ppo": each_token(lambda ratio, advantage: min(ratio * advantage, clip(ratio) * advantage)),
    "grpo": each_token(lambda ratio, advantage: min(ratio * advantage, clip(ratio) * advantage)),
    "cispo": weighted(lambda ratio: min(ratio, 2.5)),
    "gspo": naive_gspo,
}


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 2**31))
def test_it_is_its_formula(name: str, seed: int) -> None:
    tokens = random_tokens(seed)
    assert LOSSES[name](tokens, ALGO)[0].item() == pytest.approx(NAIVE[name](tokens), rel=1e-9, abs=1e-12)


def slope(loss: Callable[[TokenBatch], float], tokens: TokenBatch, at: int, step: float = 1e-6) -> float:
    """The formula's own derivative, by differences."""
    policy = tokens.policy_logprobs_N.detach()
    moved = [replace(tokens, policy_logprobs_N=policy + step * sign * unit(at, policy)) for sign in (1, -1)]
    return (loss(moved[0]) - loss(moved[1])) / (2 * step)


def unit(at: int, like: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(at), len(like)).to(like.dtype)


@pytest.mark.parametrize("name", ["reinforce", "ppo", "grpo", "gspo"])
@pytest.mark.parametrize("seed", range(5))
def test_its_gradient_is_the_formulas_slope(name: str, seed: int) -> None:
    """For losses without a constant weight, which no difference of values can see."""
    tokens = random_tokens(seed)
    (found,) = torch.autograd.grad(LOSSES[name](tokens, ALGO)[0], tokens.policy_logprobs_N)
    for at in range(sum(LENGTHS)):
        assert found[at].item() == pytest.approx(slope(NAIVE[name], tokens, at), abs=1e-6)


@pytest.mark.parametrize(("name", "cut"), [("aipo", 3.0), ("cispo", 2.5)])
@pytest.mark.parametrize("seed", range(5))
def test_a_constant_weight_is_the_gradient(name: str, cut: float, seed: int) -> None:
    """d loss / d log pi of a token is -min(ratio, cut) * A / num_tokens, below the cut and above it."""
    tokens = random_tokens(seed)
    (found,) = torch.autograd.grad(LOSSES[name](tokens, ALGO)[0], tokens.policy_logprobs_N)
    ratio = (tokens.policy_logprobs_N - tokens.behavior_logprobs_N).exp()
    assert (ratio > cut).any() and (ratio < cut).any()
    assert torch.allclose(found, -ratio.clamp(max=cut) * tokens.advantages_N / tokens.num_tokens)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.2, 2.0])
def test_ppo_stops_pulling_only_beyond_the_clip_in_the_direction_of_the_pull(ratio: float, advantage: float) -> None:
    policy = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    tokens = replace(
        random_tokens(0),
        policy_logprobs_N=policy,
        behavior_logprobs_N=torch.tensor([-math.log(ratio)], dtype=torch.float64),
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        num_tokens=1,
    )
    loss, metrics = LOSSES["ppo"](tokens, ALGO)
    (found,) = torch.autograd.grad(loss, policy)
    held = ratio > 1.4 if advantage > 0 else ratio < 0.7
    assert found.item() == pytest.approx(0.0 if held else -ratio * advantage)
    assert float(metrics["clipped_share"]) == float(held)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_parts_of_whole_answers_add_up_to_the_whole(name: str, seed: int) -> None:
    tokens = random_tokens(seed)
    cut = LENGTHS[0] + LENGTHS[1] + (2 if is_tokenwise(LOSSES[name]) else 0)
    parts = [part_of(tokens, part) for part in (slice(None, cut), slice(cut, None))]
    whole = LOSSES[name](tokens, ALGO)[0]
    assert sum(LOSSES[name](part, ALGO)[0].item() for part in parts) == pytest.approx(whole.item())


def part_of(tokens: TokenBatch, part: slice) -> TokenBatch:
    return replace(
        tokens,
        policy_logprobs_N=tokens.policy_logprobs_N[part],
        behavior_logprobs_N=tokens.behavior_logprobs_N[part],
        advantages_N=tokens.advantages_N[part],
        sequence_N=tokens.sequence_N[part],
        entropy_N=tokens.entropy_N[part],
    )


def test_the_objective_adds_the_kl_to_the_reference_and_takes_the_entropy() -> None:
    tokens = random_tokens(1)
    algo = AlgoConfig(reference_kl=0.5, entropy=0.25)
    value, metrics = objective(aipo_loss, tokens, algo)
    loss, _ = aipo_loss(tokens, algo)
    log_ratios = (tokens.columns[REFERENCE_LOGPROBS] - tokens.policy_logprobs_N).tolist()
    kl = [math.exp(one) - one - 1 for one in log_ratios]
    entropy = tokens.entropy_N.sum().item()
    expected = loss.item() + (0.5 * sum(kl) - 0.25 * entropy) / tokens.num_tokens
    assert value.item() == pytest.approx(expected)
    assert float(metrics["kl_reference"]) == pytest.approx(sum(kl) / len(kl))
    (pull,) = torch.autograd.grad(value, tokens.entropy_N)
    assert torch.allclose(pull, torch.full_like(pull, -0.25 / tokens.num_tokens))


def test_without_weights_the_objective_is_the_loss_and_asks_for_no_reference() -> None:
    tokens = replace(random_tokens(1), columns={})
    assert objective(aipo_loss, tokens, AlgoConfig())[0].item() == aipo_loss(tokens, AlgoConfig())[0].item()


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20))
def test_the_kl_estimate_is_never_negative_and_zero_only_where_both_agree(log_ratios: list[float]) -> None:
    found = kl_estimate(torch.tensor(log_ratios, dtype=torch.float64))
    assert (found >= 0).all()
    assert kl_estimate(torch.zeros(1)).item() == 0.0


def test_the_kl_estimate_has_the_kl_as_its_mean() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    assert (p * kl_estimate(q.log() - p.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item())
