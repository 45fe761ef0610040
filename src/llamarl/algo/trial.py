"""A user's own loss, tried on a few invented tokens before anything starts: what cannot work would fail in every update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llamarl.algo.batch import TokenBatch
from llamarl.algo.losses import Loss
from llamarl.config import Algo
from llamarl.errors import ConfigError


class _AnyColumn(dict[str, Tensor]):
    """Has every column that a role of the line may add."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Tensor:
        return torch.full((4,), -1.0)


def try_loss(loss: Loss, algo: Algo) -> None:
    """Refuse a loss that raises, or returns something else than a scalar that carries a gradient, and metrics."""
    policy_N, entropy_N = (torch.full((4,), value, requires_grad=True) for value in (-1.0, 0.5))
    tokens = TokenBatch(
        policy_logprobs_N=policy_N,
        behavior_logprobs_N=torch.tensor([-1.0, -1.1, -0.9, -1.0]),
        advantages_N=torch.tensor([0.5, 0.5, -0.5, -0.5]),
        sequence_N=torch.tensor([0, 0, 1, 1]),
        entropy_N=entropy_N,
        num_tokens=4,
        num_sequences=2,
        columns=_AnyColumn(),
    )
    try:
        found: object = loss(tokens, algo)
    except Exception as error:  # the user's file is foreign code: whatever it raises becomes one line
        raise ConfigError(f"algo.loss: fails on a trial batch: {type(error).__name__}: {error}") from error
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise ConfigError(f"algo.loss: must return a loss and a dict of metrics, returns {_kind(found)}")
    value = found[0]
    if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
        raise ConfigError(
            "algo.loss: the loss must be a scalar tensor that carries the gradient of tokens.policy_logprobs_N, is "
            f"{_kind(value)}"
        )
    for name, metric in found[1].items():
        if not isinstance(metric, int | float) and not (isinstance(metric, Tensor) and metric.numel() == 1):
            raise ConfigError(f"algo.loss: the metric {name!r} must be a number or a scalar tensor, is {_kind(metric)}")


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}" if value is not None else "nothing"
