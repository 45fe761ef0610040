"""A loss of the user's: tried on a made-up batch before anything starts, and guarded while it trains.

Whatever it raises, or returns instead of a loss, becomes one line with file and line number. It would happen again, so the
trainer is not restarted for it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from llamarl.algo.batch import TokenBatch
from llamarl.algo.losses import Loss, is_tokenwise
from llamarl.config import AlgoConfig
from llamarl.errors import ConfigError, OwnCodeFailed
from llamarl.plugins import describe_error

_LENGTHS = (3, 2, 4)  # lengths of the made-up answers
_CUT_BETWEEN, _CUT_INSIDE = 3, 7  # places where the batch is cut: between two answers, and inside of one
_CLOSE = 0.02  # relative; what parts may differ by from the whole, which is rounding, of bfloat16 at worst
# Metrics that every update has without the loss; those of single versions end in their staleness.
MEASURED = frozenset(
    [
        "update",
        "role",
        "reward",
        "loss",
        "lr",
        "grad_norm",
        "groups",
        "completions",
        "skipped",
        "trained_tokens",
        "answer_tokens",
        "truncated_share",
        "sampled_logprob",
        "zero_variance_share",
        "entropy",
        "kl_behavior",
        "ratio_mean",
        "ratio_max",
        "effective_sample_size",
        "staleness_mean",
        "staleness_max",
        "logprob_gap",
    ]
)


class _AnyColumn(dict[str, Tensor]):
    """Has a column of any name, since roles of the user's may add any."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __missing__(self, name: str) -> Tensor:
        return torch.full((self._count,), -0.5)


def try_loss(loss: Loss, algo: AlgoConfig) -> list[str]:
    """Raises ConfigError for a loss that cannot work on a small batch like any other, or whose parts do not add up. Returns
    notes for the user."""
    try:
        value = _value_of(loss, algo)
        if not torch.isfinite(value[0]):
            raise OwnCodeFailed(f"algo.loss: {algo.loss} returned {value[0].item()} for a small batch like any other")
        if not torch.isfinite(value).all():
            raise OwnCodeFailed(
                f"algo.loss: {algo.loss} has gradients that are no numbers for a small batch like any other"
            )
        if not torch.equal(value, _value_of(loss, algo)):
            return []  # it draws numbers, or counts its calls
        _check_sum(loss, algo, value, _CUT_BETWEEN)
        if is_tokenwise(loss):
            _check_sum(loss, algo, value, _CUT_INSIDE)
        return _undivided(loss, algo, value)
    except OwnCodeFailed as error:
        raise ConfigError(str(error)) from error.__cause__


def _value_of(loss: Loss, algo: AlgoConfig, part: slice = slice(None), *, times: int = 1) -> Tensor:
    """The loss of a part of the made-up batch, and its gradient by every log-prob. The whole update is `times` the batch."""
    tokens, same = _made_up_batch(part, times), _made_up_batch(part, times)
    value, _ = guarded(loss)(tokens, algo)
    for one in fields(tokens):
        given = getattr(tokens, one.name)
        if isinstance(given, Tensor) and not torch.equal(given, getattr(same, one.name)):
            raise OwnCodeFailed(
                f"algo.loss: {algo.loss} changes tokens.{one.name} in place, which falsifies other metrics; change a copy"
            )
    gradient_N = torch.zeros_like(tokens.policy_logprobs_N)
    if value.requires_grad:
        try:
            (gradient_N,) = torch.autograd.grad(value, tokens.policy_logprobs_N, materialize_grads=True)
        except Exception as error:
            raise OwnCodeFailed(f"algo.loss: the gradient of {algo.loss} failed: {describe_error(error)}") from error
    return torch.cat([value.detach()[None], gradient_N])


def _check_sum(loss: Loss, algo: AlgoConfig, whole: Tensor, cut: int) -> None:
    """Refuses a loss that is not the sum of its parts: its gradient would depend on how updates are cut into packs."""
    first, second = _value_of(loss, algo, slice(0, cut)), _value_of(loss, algo, slice(cut, None))
    parts = torch.cat([first[:1] + second[:1], first[1:], second[1:]])
    if torch.allclose(parts, whole, rtol=_CLOSE, atol=_CLOSE * float(whole.abs().max())):
        return
    told = f"{whole[0]:.4g} for three answers, and {parts[0]:.4g} for the same ones in two parts"
    if torch.allclose(parts[:1], whole[:1], rtol=_CLOSE):
        told = "other gradients for three answers than for the same ones in two parts"
    if cut == _CUT_BETWEEN:
        advice = (
            ": divide sums over tokens by tokens.num_tokens, or sums over answers by tokens.num_sequences, the counts of the "
            "whole update, and take no other means over a part"
        )
    else:
        advice = ", cut inside an answer: its tokens depend on each other, so leave out @tokenwise"
    raise OwnCodeFailed(f"algo.loss: {algo.loss} gives {told}{advice}")


def _undivided(loss: Loss, algo: AlgoConfig, value: Tensor) -> list[str]:
    """A note on what may be a plain sum over the update, beside terms that are means: they would weigh next to nothing."""
    beside = [f"algo.{name}" for name in ("reference_kl", "entropy") if getattr(algo, name)]
    if not beside or not value.any() or not torch.equal(value, _value_of(loss, algo, times=2)):
        return []
    return [
        f"NOTE: algo.loss: {algo.loss} uses neither tokens.num_tokens nor tokens.num_sequences; if it is a plain sum over "
        f"the update, {' and '.join(beside)}, a mean over its tokens, weighs next to nothing beside it: divide the sum by one"
    ]


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
        if name in MEASURED:
            return f"returned the metric {name!r}, which every update has; give yours another name"
    return ""


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _made_up_batch(part: slice, times: int) -> TokenBatch:
    count, lengths = sum(_LENGTHS), torch.tensor(_LENGTHS)
    policy_logprobs_N = torch.linspace(-2.0, -0.1, count)[part].requires_grad_()
    return TokenBatch(
        policy_logprobs_N=policy_logprobs_N,
        behavior_logprobs_N=torch.linspace(-1.8, -0.2, count)[part],
        advantages_N=torch.repeat_interleave(torch.tensor([1.0, -1.0, 0.5]), lengths)[part],
        sequence_N=torch.repeat_interleave(torch.arange(len(_LENGTHS)), lengths)[part],
        entropy_N=torch.full_like(policy_logprobs_N, 0.7).requires_grad_(),
        num_tokens=times * count,
        num_sequences=times * len(_LENGTHS),
        columns=_AnyColumn(len(policy_logprobs_N)),
    )
