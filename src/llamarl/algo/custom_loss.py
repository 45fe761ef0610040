"""A loss of the user's: tried on a made-up batch before anything starts, and guarded while it trains.

Whatever it raises, or returns instead of a loss, becomes one line with file and line number. It would happen again, so the
trainer is not restarted for it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llamarl.algo.batch import TokenBatch
from llamarl.algo.losses import Loss
from llamarl.config import AlgoConfig
from llamarl.errors import ConfigError, OwnCodeFailed
from llamarl.plugins import describe_error

_LENGTHS = (3, 2, 4)  # lengths of the made-up answers


class _AnyColumn(dict[str, Tensor]):
    """Has a column of any name, since roles of the user's may add any."""

    def __missing__(self, name: str) -> Tensor:
        return torch.full((sum(_LENGTHS),), -0.5)


def try_loss(loss: Loss, algo: AlgoConfig) -> None:
    """Raises ConfigError for a loss that cannot work on a small batch like any other."""
    try:
        value, _ = guarded(loss)(_made_up_batch(), algo)
        if not torch.isfinite(value):
            raise OwnCodeFailed(f"algo.loss: {algo.loss} returned {value.item()} for a small batch like any other")
    except OwnCodeFailed as error:
        raise ConfigError(str(error)) from error.__cause__


def guarded(loss: Loss) -> Loss:
    """The same loss, whose every failure is an OwnCodeFailed."""

    @functools.wraps(loss)
    def guarded_loss(tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        try:
            returned = loss(tokens, algo)
        except OwnCodeFailed:
            raise
        except Exception as error:  # the border to the user's code
            raise OwnCodeFailed(f"algo.loss: {algo.loss} failed: {describe_error(error)}") from error
        if problem := _problem_with(returned, differentiable=not algo.reference_kl and not algo.entropy):
            raise OwnCodeFailed(f"algo.loss: {algo.loss} {problem}")
        return returned

    return guarded_loss


def _problem_with(returned: Any, *, differentiable: bool) -> str:
    """The fault of a returned value; empty: it is a loss."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        return f"returned {_kind(returned)}; it must return (loss, metrics)"
    loss, metrics = returned
    if not isinstance(loss, Tensor):
        return f"returned {_kind(loss)} for the loss; it must be a tensor with one number"
    if loss.dim():
        return f"returned a loss of shape {tuple(loss.shape)}; it must be one number: sum it and divide by num_tokens"
    if not loss.dtype.is_floating_point:
        return f"returned a loss of {loss.dtype}; it must be a floating-point number"
    if differentiable and not loss.requires_grad:
        return "returned a loss without a gradient; it must be computed from tokens.policy_logprobs_N, not detached"
    if not isinstance(metrics, Mapping):
        return f"returned {_kind(metrics)} for the metrics; it must be a dict of names and numbers"
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_number(value):
            return f"returned the metric {name!r} as {_kind(value)}; it must be one number"
    return ""


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _made_up_batch() -> TokenBatch:
    count = sum(_LENGTHS)
    entropy_N = torch.full((count,), 0.7, requires_grad=True)
    return TokenBatch(
        policy_logprobs_N=torch.linspace(-2.0, -0.1, count).requires_grad_(),
        behavior_logprobs_N=torch.linspace(-1.8, -0.2, count),
        advantages_N=torch.repeat_interleave(torch.tensor([1.0, -1.0, 0.5]), torch.tensor(_LENGTHS)),
        sequence_N=torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS)),
        entropy_N=entropy_N,
        num_tokens=count,
        num_sequences=len(_LENGTHS),
        columns=_AnyColumn(),
    )
