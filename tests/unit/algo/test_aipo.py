"""AIPO is what the paper says: min(pi / mu, rho) * A * grad log pi, token by token, clipped from above only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llamarl.algo.batch import TokenBatch
from llamarl.algo.losses import LOSSES, aipo_loss
from llamarl.config import AlgoConfig

RHO = 4.0
ALGO = AlgoConfig(rho=RHO)


def batch_of(policy: Tensor, ratio: Tensor, advantages: Tensor) -> TokenBatch:
    """Tokens whose pi / mu is `ratio`."""
    behavior = policy.detach() - ratio.log()
    return TokenBatch(
        policy,
        behavior,
        advantages,
        sequence_N=torch.zeros(len(policy), dtype=torch.int64),
        entropy_N=torch.zeros_like(policy),
        num_tokens=len(policy),
        num_sequences=1,
    )


def gradient(loss: Tensor, inputs: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    return found


def small_policy(seed: int, tokens: int = 12, vocabulary: int = 7) -> tuple[Tensor, Tensor]:
    """Logits that carry a gradient, and which token of each row was sampled."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.randint(vocabulary, (tokens,), generator=generator)


def logprobs_of(logits: Tensor, sampled: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1).gather(1, sampled[:, None])[:, 0]


@given(st.integers(0, 2**31))
def test_on_policy_aipo_gradient_equals_reinforce(seed: int) -> None:
    logits, sampled = small_policy(seed)
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    policy = logprobs_of(logits, sampled)
    aipo, _ = aipo_loss(batch_of(policy, torch.ones(12, dtype=torch.float64), advantages), ALGO)
    reinforce = -(advantages * logprobs_of(logits, sampled)).mean()
    assert torch.allclose(gradient(aipo, logits), gradient(reinforce, logits), rtol=1e-12, atol=1e-15)


def test_on_policy_gradient_equals_the_formula_of_the_softmax() -> None:
    """Without autograd: d/dlogits of -A log pi(y) is A * (pi - onehot(y))."""
    logits, sampled = small_policy(3)
    advantages = torch.linspace(-1, 1, 12, dtype=torch.float64)
    loss, _ = aipo_loss(batch_of(logprobs_of(logits, sampled), torch.ones(12, dtype=torch.float64), advantages), ALGO)
    onehot = torch.nn.functional.one_hot(sampled, 7)
    expected = advantages[:, None] * (logits.detach().softmax(-1) - onehot) / 12
    assert torch.allclose(gradient(loss, logits), expected, atol=1e-15)


@pytest.mark.parametrize(
    ("ratio", "weight"),
    [(0.0001, 0.0001), (0.5, 0.5), (1.0, 1.0), (3.999, 3.999), (4.0, 4.0), (4.001, 4.0), (100.0, 4.0), (1e30, 4.0)],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_token_weighs_its_ratio_and_above_rho_exactly_rho(ratio: float, weight: float, advantage: float) -> None:
    """The gradient of one token's loss with respect to its log-prob is -weight * A: by hand, for both signs of A."""
    policy = torch.tensor([-1.5], dtype=torch.float64).requires_grad_()
    tokens = batch_of(
        policy, torch.tensor([ratio], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    )
    loss, _ = aipo_loss(tokens, ALGO)
    assert gradient(loss, policy).item() == pytest.approx(-weight * advantage)


def test_above_rho_a_token_keeps_weight_rho_and_is_not_dropped() -> None:
    """The form -clamp(ratio, max=rho) * A, found in public code, gives such a token no gradient at all."""
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64).requires_grad_()
    ratio, advantages = torch.tensor([2.0, 50.0], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    tokens = batch_of(policy, ratio, advantages)
    right, _ = aipo_loss(tokens, ALGO)
    wrong = -((policy - tokens.behavior_logprobs_N).exp().clamp(max=RHO) * advantages).sum() / 2
    assert gradient(right, policy).tolist() == pytest.approx([-2.0 / 2, -RHO / 2])
    assert gradient(wrong, policy).tolist() == pytest.approx([-2.0 / 2, 0.0])


def test_the_weight_is_a_constant_for_the_gradient() -> None:
    """If the ratio were differentiated too, a token's gradient would be -ratio * A * (1 + log pi), not -ratio * A."""
    policy = torch.tensor([-3.0], dtype=torch.float64).requires_grad_()
    loss, _ = aipo_loss(batch_of(policy, torch.tensor([0.5]).double(), torch.tensor([1.0]).double()), ALGO)
    assert gradient(loss, policy).item() == pytest.approx(-0.5)
    assert loss.item() == pytest.approx(-0.5 * -3.0)


@given(st.integers(0, 2**31), st.integers(1, 11))
def test_parts_of_an_update_add_up_to_the_whole(seed: int, cut: int) -> None:
    logits, sampled = small_policy(seed)
    generator = torch.Generator().manual_seed(seed)
    ratio = torch.rand(12, generator=generator, dtype=torch.float64) * 8 + 1e-3
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)
    whole = batch_of(logprobs_of(logits, sampled), ratio, advantages)
    parts = [
        replace(
            whole,
            policy_logprobs_N=whole.policy_logprobs_N[part],
            behavior_logprobs_N=whole.behavior_logprobs_N[part],
            advantages_N=whole.advantages_N[part],
            sequence_N=whole.sequence_N[part],
            entropy_N=whole.entropy_N[part],
        )
        for part in (slice(None, cut), slice(cut, None))
    ]
    total = aipo_loss(parts[0], ALGO)[0] + aipo_loss(parts[1], ALGO)[0]
    loss, _ = aipo_loss(whole, ALGO)
    assert total.item() == pytest.approx(loss.item(), rel=1e-12, abs=1e-14)
    assert torch.allclose(gradient(total, logits), gradient(loss, logits), rtol=1e-12, atol=1e-15)


def test_the_clipped_share_by_hand() -> None:
    ratio = torch.tensor([0.5, 3.9, 6.0, 8.0], dtype=torch.float64)
    tokens = batch_of(torch.full((4,), -1.0, dtype=torch.float64), ratio, torch.ones(4, dtype=torch.float64))
    assert {name: float(value) for name, value in aipo_loss(tokens, ALGO)[1].items()} == {"clipped_share": 0.5}


def test_a_ratio_beyond_all_numbers_still_weighs_rho() -> None:
    policy = torch.tensor([-0.1], requires_grad=True)
    tokens = replace(batch_of(policy, torch.ones(1), torch.tensor([1.0])), behavior_logprobs_N=torch.tensor([-1000.0]))
    loss, _ = aipo_loss(tokens, ALGO)
    assert gradient(loss, policy).item() == pytest.approx(-RHO)


def test_aipo_is_the_default_loss() -> None:
    assert LOSSES[AlgoConfig().loss] is aipo_loss
