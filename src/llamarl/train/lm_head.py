"""The head in chunks: log-prob and entropy of every token without ever holding [tokens x vocabulary].

Scores are always fp32: narrow operands are multiplied exactly and summed in fp32. There are two ways:

`chunked_logprobs`  two differentiable vectors; the backward pass computes the scores again, chunk by chunk.
`fused_loss`        for a loss that may be cut anywhere: value and gradient of a chunk are computed together, so its scores
                    are computed once.

`fused_loss` also adds the KL to a teacher over the whole vocabulary, from the teacher's states and head: the scores of both
exist for one chunk only, and such chunks are half as long.

With tensor parallelism every rank holds some rows of the head: maxima and sums over the vocabulary are completed over the
tensor group; every rank has all tokens. A teacher's head is cut into the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
class TeacherStates:
    """What the KL to a teacher is computed from, for the same tokens. `forward` is the share of the forward KL(teacher ||
    policy) in it; the rest is the reverse KL(policy || teacher)."""

    hidden_NC: Tensor
    weight_VC: Tensor  # the teacher's head
    weight: float  # of each token's KL in the loss
    forward: float = 0.0
    divisor: float = 1.0  # of its scores, and what bounds them (`Head`)
    softcap: float = 0.0
    logprobs_N: Tensor | None = (
        None  # of the targets, as the teacher itself computed them, to be compared; None: nothing is
    )


@dataclass(frozen=True)
class Head:
    """How scores are computed: divided by the model's own divisor, bounded by its softcap, divided by the sampling
    temperature; `chunk` tokens at a time."""

    temperature: float = 1.0
    vocabulary: Vocabulary = Vocabulary()
    chunk: int = 0  # tokens; 0: as many as `_SCORE_BYTES` allows
    compiled: bool = False
    divisor: float = 1.0
    softcap: float = 0.0  # 0: none

    def parts(self, num_tokens: int, vocab_size: int, policies: int = 1) -> Iterator[slice]:
        """Chunks of tokens, of which the scores of so many policies exist at the same time."""
        size = self.chunk or max(_TILE, _SCORE_BYTES // (4 * vocab_size * policies) // _TILE * _TILE)
        for start in range(0, num_tokens, size):
            yield slice(start, min(start + size, num_tokens))

    def scores(self, hidden_nC: Tensor, weight_VC: Tensor) -> Tensor:
        scores_nV = _product(hidden_nC, weight_VC.t())
        if self.divisor != 1.0:
            scores_nV.div_(self.divisor)
        if self.softcap:
            scores_nV.div_(self.softcap).tanh_().mul_(self.softcap)
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
        """Gradient of the loss with respect to the product, before all that `scores` does to it, in the precision of its
        operands."""
        differentiate = _compiled(_score_gradient, compile_backend()) if self.compiled else _score_gradient
        local_n = targets_n - self.vocabulary.first
        of_logprob_n, of_entropy_n = (grad / (self.temperature * self.divisor) for grad in grads)
        wide = torch.float32 if self.softcap else dtype
        self._for_any_length(scores_nV, local_n, normalizer_n, entropy_n, of_logprob_n, of_entropy_n)
        found: Tensor = differentiate(scores_nV, local_n, normalizer_n, entropy_n, of_logprob_n, of_entropy_n, wide)
        return self._before_softcap(found, scores_nV, dtype)

    def divergence(
        self, scores_nV: Tensor, normalizer_n: Tensor, teacher_nV: Tensor, forward: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The KL, its reverse part, and the log of the teacher's normalizer."""
        highest_n = self.vocabulary.max(teacher_nV.amax(-1))
        weigh = _compiled(_mass, compile_backend()) if self.compiled else _mass
        teacher_normalizer_n = highest_n + self.vocabulary.sum(weigh(teacher_nV, highest_n)).log()
        measure = _compiled(_divergences, compile_backend()) if self.compiled else _divergences
        both = measure(scores_nV, normalizer_n, teacher_nV, teacher_normalizer_n)
        reverse_n, forward_n = self.vocabulary.sum(both)
        return torch.lerp(reverse_n, forward_n, forward), reverse_n, teacher_normalizer_n

    def score_gradient_beside(
        self,
        scores_nV: Tensor,
        pieces: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        teacher_nV: Tensor,
        of_teacher: tuple[Tensor, Tensor],
        share: tuple[float, float],
        dtype: torch.dtype,
    ) -> Tensor:
        """The same with the gradient of the KL to a teacher, whose `share` is its weight and that of the forward KL."""
        differentiate = _compiled(_gradient_beside, compile_backend()) if self.compiled else _gradient_beside
        targets_n, normalizer_n, entropy_n = pieces
        pieces = targets_n - self.vocabulary.first, normalizer_n, entropy_n
        of_logprob_n, of_entropy_n = (grad / (self.temperature * self.divisor) for grad in grads)
        # A tensor, since compiled code would be made anew for every number.
        weight = torch.full((), share[0] / (self.temperature * self.divisor), device=scores_nV.device)
        self._for_any_length(scores_nV, *pieces, of_logprob_n, of_entropy_n, teacher_nV, *of_teacher)
        wide = torch.float32 if self.softcap else dtype
        found: Tensor = differentiate(
            scores_nV, *pieces, of_logprob_n, of_entropy_n, teacher_nV, *of_teacher, weight, share[1], wide
        )
        return self._before_softcap(found, scores_nV, dtype)

    def _before_softcap(self, found: Tensor, scores_nV: Tensor, dtype: torch.dtype) -> Tensor:
        """A gradient of the bounded scores becomes that of those before: times the derivative of tanh."""
        if self.softcap:
            found = (found * (1.0 - (scores_nV * (self.temperature / self.softcap)).square())).to(dtype)
        return found


def chunked_logprobs(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N], differentiable."""
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(hidden_NC, weight_VC, targets_N, head)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N


def fused_loss(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, part_loss: PartLoss, head: Head
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of `part_loss` over all chunks, differentiable; and log-probs and entropies, which are not."""
    return taught_loss(hidden_NC, weight_VC, targets_N, part_loss, head, None)[:3]


def taught_loss(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    part_loss: PartLoss,
    head: Head,
    teacher: TeacherStates | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same plus the KL to the teacher; then, of each token and not differentiable, that KL, and how far the teacher's
    log-prob is from the one that it has given."""
    found = _FusedLoss.apply(hidden_NC, weight_VC, targets_N, part_loss, head, teacher)  # type: ignore[no-untyped-call]
    loss, logprobs_N, entropy_N, kl_N, gap_N = found
    return loss, logprobs_N, entropy_N, kl_N, gap_N


def no_loss(part: slice, logprobs_n: Tensor, entropy_n: Tensor) -> Tensor:
    """For tokens that learn from a teacher alone."""
    return torch.zeros((), device=logprobs_n.device)


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
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        targets_N: Tensor,
        part_loss: PartLoss,
        head: Head,
        teacher: TeacherStates | None,
    ) -> tuple[Tensor, ...]:
        found = torch.zeros(4, len(targets_N), dtype=torch.float32, device=hidden_NC.device)
        gradient = _Gradient(hidden_NC, weight_VC, trained=ctx.needs_input_grad[1])
        loss = torch.zeros((), dtype=torch.float32, device=hidden_NC.device)
        for part in head.parts(len(targets_N), len(weight_VC), 1 if teacher is None else 2):
            scores_nV = head.scores(hidden_NC[part], weight_VC)
            logprobs_n, entropy_n, normalizer_n = head.statistics(scores_nV, targets_N[part])
            value, grads = _differentiate(part_loss, part, logprobs_n, entropy_n)
            pieces = (targets_N[part], normalizer_n, entropy_n)
            if teacher is None:
                gradient.add(part, head.score_gradient(scores_nV, *pieces, grads, hidden_NC.dtype))
            else:
                kl_n, gap_n, score_grad_nV = _taught(head, teacher, part, scores_nV, pieces, grads, hidden_NC.dtype)
                gradient.add(part, score_grad_nV)
                found[2][part], found[3][part] = kl_n, gap_n
                value = value + teacher.weight * kl_n.sum()
            loss += value
            found[0][part], found[1][part] = logprobs_n, entropy_n
        ctx.save_for_backward(*gradient.finish(head.vocabulary))
        measures = tuple(found)
        ctx.mark_non_differentiable(*measures)
        return loss, *measures

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad_NC, weight_grad_VC = ctx.saved_tensors
        scale = grads[0]
        return (
            hidden_grad_NC * scale.to(hidden_grad_NC.dtype),
            None if weight_grad_VC is None else weight_grad_VC * scale.to(weight_grad_VC.dtype),
            *[None] * 4,
        )


def _taught(
    head: Head,
    teacher: TeacherStates,
    part: slice,
    scores_nV: Tensor,
    pieces: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The KL of a chunk's tokens, how far the teacher's log-probs are from those it has given, and the gradient of the scores
    with the KL."""
    own = replace(head, divisor=teacher.divisor, softcap=teacher.softcap)
    own_nV = own.scores(teacher.hidden_NC[part], teacher.weight_VC)
    gap_n = torch.zeros_like(pieces[1])
    if teacher.logprobs_N is not None:
        gap_n = (own.statistics(own_nV, pieces[0])[0] - teacher.logprobs_N[part]).abs()
    teacher_nV = _as_wide(own_nV, scores_nV.shape[1])
    kl_n, reverse_n, normalizer_n = head.divergence(scores_nV, pieces[1], teacher_nV, teacher.forward)
    share = (teacher.weight, teacher.forward)
    beside = head.score_gradient_beside(scores_nV, pieces, grads, teacher_nV, (normalizer_n, reverse_n), share, dtype)
    return kl_n, gap_n, beside


def _as_wide(teacher_nV: Tensor, rows: int) -> Tensor:
    """A teacher's scores for as many ids as the policy has. Heads of one tokenizer are padded differently: ids that only the
    teacher has are left out, and those that only the policy has are as unlikely as the teacher's least likely one."""
    missing = rows - teacher_nV.shape[1]
    if missing > 0:
        least_n1 = teacher_nV.amin(-1, keepdim=True)
        return torch.cat([teacher_nV, least_n1.expand(-1, missing)], -1)
    return teacher_nV[:, :rows].contiguous() if missing else teacher_nV


def _differentiate(
    part_loss: PartLoss, part: slice, logprobs_n: Tensor, entropy_n: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    with torch.enable_grad():
        inputs = logprobs_n.detach().requires_grad_(), entropy_n.detach().requires_grad_()
        value = part_loss(part, *inputs)
        if not value.requires_grad:
            return value, (torch.zeros_like(logprobs_n), torch.zeros_like(entropy_n))
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


def _mass(scores_nV: Tensor, highest_n: Tensor) -> Tensor:
    return (scores_nV - highest_n[:, None]).exp().sum(-1)


def _divergences(scores_nV: Tensor, normalizer_n: Tensor, teacher_nV: Tensor, teacher_normalizer_n: Tensor) -> Tensor:
    """The reverse and the forward KL, over these rows of the vocabulary: sums of p (log p - log q) and q (log q - log p)."""
    logp_nV = scores_nV - normalizer_n[:, None]
    logq_nV = teacher_nV - teacher_normalizer_n[:, None]
    gap_nV = logp_nV - logq_nV
    return torch.stack([(logp_nV.exp() * gap_nV).sum(-1), -(logq_nV.exp() * gap_nV).sum(-1)])


def _gradient_beside(
    scores_nV: Tensor,
    targets_n: Tensor,
    normalizer_n: Tensor,
    entropy_n: Tensor,
    logprob_grad_n: Tensor,
    entropy_grad_n: Tensor,
    teacher_nV: Tensor,
    teacher_normalizer_n: Tensor,
    reverse_n: Tensor,
    weight: Tensor,
    forward: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of `_score_gradient`, and that of the KL: d reverse / d score = p (log p - log q - reverse), and
    d forward / d score = p - q."""
    plain_nV = _score_gradient(
        scores_nV, targets_n, normalizer_n, entropy_n, logprob_grad_n, entropy_grad_n, torch.float32
    )
    logp_nV = scores_nV - normalizer_n[:, None]
    logq_nV = teacher_nV - teacher_normalizer_n[:, None]
    p_nV = logp_nV.exp()
    of_kl_nV = (1 - forward) * p_nV * (logp_nV - logq_nV - reverse_n[:, None]) + forward * (p_nV - logq_nV.exp())
    return (plain_nV + weight * of_kl_nV).to(dtype)


@cache
def _compiled(function: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    return torch.compile(function, backend=backend)
