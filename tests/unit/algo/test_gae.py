"""GAE and the value loss are what their formulas say, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llamarl.algo.gae import explained_variance, gae, whitened
from llamarl.algo.streams import value_stream

VALUES = np.array([0.2, 0.5, 0.4], dtype=np.float32)


def test_three_tokens_by_hand() -> None:
    """V = .2 .5 .4, reward 1 at the end, gamma .9, lambda .5: the deltas are .25, -.14 and .6."""
    found = gae(VALUES, 1.0, gamma=0.9, decay=0.5)
    last = 1.0 - 0.4
    middle = (0.9 * 0.4 - 0.5) + 0.45 * last
    first = (0.9 * 0.5 - 0.2) + 0.45 * middle
    np.testing.assert_allclose(found, [first, middle, last], rtol=1e-6)
    np.testing.assert_allclose(found, [0.3085, 0.13, 0.6], rtol=1e-6)


def test_lambda_one_is_the_return_minus_the_value_and_zero_the_next_step() -> None:
    np.testing.assert_allclose(gae(VALUES, 1.0, gamma=1.0, decay=1.0), 1.0 - VALUES, rtol=1e-6)
    np.testing.assert_allclose(gae(VALUES, 1.0, gamma=1.0, decay=0.0), [0.3, -0.1, 0.6], rtol=1e-6)
    discounted = np.array([0.81, 0.9, 1.0]) - VALUES
    np.testing.assert_allclose(gae(VALUES, 1.0, gamma=0.9, decay=1.0), discounted, rtol=1e-6)
    assert gae(VALUES[:0], 1.0, gamma=1.0, decay=1.0).shape == (0,)


def test_values_that_are_shifted_by_a_token_give_other_advantages() -> None:
    shifted = np.roll(VALUES, 1)
    assert not np.allclose(gae(VALUES, 1.0, gamma=1.0, decay=0.95), gae(shifted, 1.0, gamma=1.0, decay=0.95), atol=0.05)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_all_tokens() -> None:
    found = whitened([VALUES, np.array([2.0, -1.0], dtype=np.float32)])
    assert [len(one) for one in found] == [3, 2]
    every = np.concatenate(found)
    np.testing.assert_allclose([every.mean(), every.std()], [0.0, 1.0], atol=1e-6)
    assert every.argmax() == 3 and every.argmin() == 4, "the order stays"
    np.testing.assert_allclose(np.concatenate(whitened([np.full(7, 0.1, dtype=np.float32)])), 0.0, atol=1e-6)
    assert whitened([]) == []


def test_the_clipped_value_loss_is_ppos() -> None:
    values = torch.tensor([0.9, 0.1, 0.5], requires_grad=True)
    before, returns = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, 0.0, 0.0])
    loss, metrics = value_stream(values, before, returns, num_tokens=4, clip=0.2)
    plain = [(0.9 - 1) ** 2, (0.1 - 0) ** 2, 0.5**2]
    bounded = [(0.7 - 1) ** 2, (0.3 - 0) ** 2, 0.5**2]
    assert loss.item() == pytest.approx(0.5 * sum(map(max, plain, bounded)) / 4)
    assert metrics["value_clipped_share"] == pytest.approx(2 / 3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    np.testing.assert_allclose(values.grad, [0.0, 0.0, 0.5 / 4], atol=1e-7), "beyond the limit nothing pulls"
    unclipped, none = value_stream(values, before, returns, num_tokens=4, clip=0.0)
    assert unclipped.item() == pytest.approx(0.5 * sum(plain) / 4) and not none


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_the_mean() -> None:
    returns = [np.array([1.0, 0.0], dtype=np.float32), np.array([1.0], dtype=np.float32)]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([np.full(2, 0.7, np.float32), np.full(1, 0.7, np.float32)], returns) == pytest.approx(0.0)
    assert explained_variance([1 - one for one in returns], returns) == pytest.approx(-3.0)
    assert explained_variance(returns, [np.ones(2, np.float32), np.ones(1, np.float32)]) is None
