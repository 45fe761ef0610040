"""The head in chunks: log-prob and entropy of every token without ever holding [tokens x vocabulary].

Scores are always fp32: narrow operands are multiplied exactly and summed in fp32. There are two ways:

`chunked_logprobs`  two differentiable vectors; the backward pass computes the scores again, chunk by chunk.
`fused_loss`        for a loss that may be cut anywhere: value and gradient of a chunk are computed together, so its scores
                    are computed once.

With tensor parallelism every rank holds some rows of the head: maxima and sums over the vocabulary are completed over the
tensor group; every rank has all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.model.gpu_paths import Backend, compile_backend, on_gpu

_SCORE_BYTES = 1 << 30  # size of the fp32 scores of one chunk
_TILE = 256  # tokens; chunks are multiples of it, so that products have whole tiles

# part_loss(part, logprobs_n, entropy_n): the share of the loss of a chunk of tokens
PartLoss = Callable[[slice, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Vocabulary:
    """First row of the head on this rank, and the group of the ranks that hold the other rows."""

    first: int = 0
    group: dist.ProcessGroup | None = None

    def sum(self, tensor: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor


@dataclass(frozen=True)
class Head:
    """How scores are computed: divided by the sampling temperature, `chunk` tokens at a time."""

    temperature: float = 1.0
    vocabulary: Vocabulary = Vocabulary()
    chunk: int = 0  # tokens; 0: as many as `_SCORE_BYTES` allows
    compiled: bool = False

    def parts(self, num_tokens: int, vocab_size: int) -> Iterator[slice]:
        size = self.chunk or max(_TILE, _SCORE_BYTES // (4 * vocab_size) // _TILE * _TILE)
        for start in range(0, num_tokens, size):
            yield slice(start, min(start + size, num_tokens))

    def scores(self, hidden_nC: Tensor, weight_VC: Tensor) -> Tensor:
        scores_nV = _product(hidden_nC, weight_VC.t())
        return scores_nV if self.temperature == 1.0 else scores_nV.div_(self.temperature)

    def _for_any_length(self, *tensors: Tensor) -> None:
        """Marks the number of tokens as dynamic, so that torch makes one graph for all chunks from the start."""
        for tensor in tensors if self.compiled else ():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)

    def statistics(self, scores_nV: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob of the targets, entropy, and the log of the normalizer."""
        local_n = targets_n - self.vocabulary.first
        if self.vocabulary.group is None:
            measure = _compiled(_statistics, compile_backend()) if self.compiled else _statistics
            self._for_any_length(scores_nV, local_n)
            found: tuple[Tensor, Tensor, Tensor] = measure(scores_nV, local_n)
            return found
        return _shared_statistics(scores_nV, local_n, self.vocabulary)

    def score_gradient(
        self,
        scores_nV: Tensor,
        targets_n: Tensor,
        normalizer_n: Tensor,
        entropy_n: Tensor,
        grads: tuple[Tensor, Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """Gradient of the loss with respect to the scores before the division, in the precision of their operands."""
        differentiate = _compiled(_score_gradient, compile_backend()) if self.compiled else _score_gradient
        local_n = targets_n - self.vocabulary.first
        of_logprob_n, of_entropy_n = (grad / self.temperature for grad in grads)
        self._for_any_length(scores_nV, local_n, normalizer_n, entropy_n, of_logprob_n, of_entropy_n)
        found: Tensor = differentiate(scores_nV, local_n, normalizer_n, entropy_n, of_logprob_n, of_entropy_n, dtype)
        return found


def chunked_logprobs(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N], differentiable."""
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(hidden_NC, weight_VC, targets_N, head)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N


def fused_loss(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, part_loss: PartLoss, head: Head
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of `part_loss` over all chunks, differentiable; and log-probs and entropies, which are not."""
    found = _FusedLoss.apply(hidden_NC, weight_VC, targets_N, part_loss, head)  # type: ignore[no-untyped-call]
    loss, logprobs_N, entropy_N = found
    return loss, logprobs_N, entropy_N


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        found = torch.empty(3, len(targets_N), dtype=torch.float32, device=hidden_NC.device)
        for part in head.parts(len(targets_N), len(weight_VC)):
            scores_nV = head.scores(hidden_NC[part], weight_VC)
            for row, values_n in zip(found, head.statistics(scores_nV, targets_N[part]), strict=True):
                row[part] = values_n
        logprobs_N, entropy_N, normalizer_N = found
        ctx.save_for_backward(hidden_NC, weight_VC, targets_N, normalizer_N, entropy_N.clone())
        ctx.head = head
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NC, weight_VC, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        gradient = _Gradient(hidden_NC, weight_VC, trained=ctx.needs_input_grad[1])
        for part in ctx.head.parts(len(targets_N), len(weight_VC)):
            scores_nV = ctx.head.scores(hidden_NC[part], weight_VC)
            of_part = (grads[0][part], grads[1][part])
            pieces = (targets_N[part], normalizer_N[part], entropy_N[part])
            gradient.add(part, ctx.head.score_gradient(scores_nV, *pieces, of_part, hidden_NC.dtype))
        return *gradient.finish(ctx.head.vocabulary), None, None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, part_loss: PartLoss, head: Head
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = torch.empty(2, len(targets_N), dtype=torch.float32, device=hidden_NC.device)
        gradient = _Gradient(hidden_NC, weight_VC, trained=ctx.needs_input_grad[1])
        loss = torch.zeros((), dtype=torch.float32, device=hidden_NC.device)
        for part in head.parts(len(targets_N), len(weight_VC)):
            scores_nV = head.scores(hidden_NC[part], weight_VC)
            logprobs_n, entropy_n, normalizer_n = head.statistics(scores_nV, targets_N[part])
            value, grads = _differentiate(part_loss, part, logprobs_n, entropy_n)
            pieces = (targets_N[part], normalizer_n, entropy_n)
            gradient.add(part, head.score_gradient(scores_nV, *pieces, grads, hidden_NC.dtype))
            loss += value
            found[0][part], found[1][part] = logprobs_n, entropy_n
        ctx.save_for_backward(*gradient.finish(head.vocabulary))
        ctx.mark_non_differentiable(found[0], found[1])
        return loss, found[0], found[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad_NC, weight_grad_VC = ctx.saved_tensors
        scale = grads[0]
        return (
            hidden_grad_NC * scale.to(hidden_grad_NC.dtype),
            None if weight_grad_VC is None else weight_grad_VC * scale.to(weight_grad_VC.dtype),
            *[None] * 3,
        )


def _differentiate(
    part_loss: PartLoss, part: slice, logprobs_n: Tensor, entropy_n: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    with torch.enable_grad():
        inputs = logprobs_n.detach().requires_grad_(), entropy_n.detach().requires_grad_()
        value = part_loss(part, *inputs)
        logprob_grad_n, entropy_grad_n = torch.autograd.grad(value, inputs, materialize_grads=True)
    return value.detach(), (logprob_grad_n, entropy_grad_n)


class _Gradient:
    """Gradients of hidden states and, if it is trained, of the head, filled chunk by chunk; that of the head is summed in
    fp32."""

    def __init__(self, hidden_NC: Tensor, weight_VC: Tensor, *, trained: bool) -> None:
        self._hidden_NC, self._weight_VC = hidden_NC, weight_VC
        self._hidden_grad_NC = torch.empty_like(hidden_NC)
        self._weight_grad_VC = torch.zeros_like(weight_VC, dtype=torch.float32) if trained else None

    def add(self, part: slice, score_grad_nV: Tensor) -> None:
        torch.mm(score_grad_nV, self._weight_VC, out=self._hidden_grad_NC[part])
        if self._weight_grad_VC is not None:
            _add_product(self._weight_grad_VC, score_grad_nV.t(), self._hidden_NC[part])

    def finish(self, vocabulary: Vocabulary) -> tuple[Tensor, Tensor | None]:
        of_weight = self._weight_grad_VC
        return vocabulary.sum(self._hidden_grad_NC), None if of_weight is None else of_weight.to(self._weight_VC.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Scores in fp32, also from narrow operands."""
    if left.dtype == torch.float32:
        return left @ right
    if on_gpu(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype != torch.float32 and on_gpu(left):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _statistics(scores_nV: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    highest_n = scores_nV.amax(-1)
    shifted_nV = scores_nV - highest_n[:, None]
    exp_nV = shifted_nV.exp()
    mass_n = exp_nV.sum(-1)
    mean_n = (exp_nV * shifted_nV).sum(-1) / mass_n
    log_mass_n = mass_n.log()
    normalizer_n = highest_n + log_mass_n
    target_n = scores_nV.gather(1, targets_n[:, None])[:, 0]
    return target_n - normalizer_n, log_mass_n - mean_n, normalizer_n


def _shared_statistics(scores_nV: Tensor, local_n: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """The same, where other ranks hold other rows of the vocabulary."""
    highest_n = vocabulary.max(scores_nV.amax(-1))
    shifted_nV = scores_nV - highest_n[:, None]
    exp_nV = shifted_nV.exp()
    here_n = (local_n >= 0) & (local_n < scores_nV.shape[1])
    target_n = shifted_nV.gather(1, local_n.clamp(0, scores_nV.shape[1] - 1)[:, None])[:, 0] * here_n
    sums = vocabulary.sum(torch.stack([exp_nV.sum(-1), (exp_nV * shifted_nV).sum(-1), target_n]))
    log_mass_n = sums[0].log()
    return sums[2] - log_mass_n, log_mass_n - sums[1] / sums[0], highest_n + log_mass_n


def _score_gradient(
    scores_nV: Tensor,
    targets_n: Tensor,
    normalizer_n: Tensor,
    entropy_n: Tensor,
    logprob_grad_n: Tensor,
    entropy_grad_n: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """d log p(y) / d score = [v = y] - p, and d entropy / d score = -p (log p + entropy)."""
    logprobs_nV = scores_nV - normalizer_n[:, None]
    hit_nV = torch.arange(scores_nV.shape[1], device=scores_nV.device) == targets_n[:, None]
    pull_nV = logprob_grad_n[:, None] + entropy_grad_n[:, None] * (logprobs_nV + entropy_n[:, None])
    return (hit_nV * logprob_grad_n[:, None] - logprobs_nV.exp() * pull_nV).to(dtype)


@cache
def _compiled(function: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    return torch.compile(function, backend=backend)
