"""Documents that begin alike, and FlashAttention's two operations in plain fp32 PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from helpers.models import VOCABULARY
from llamarl.algo.batch import Document
from llamarl.algo.losses import REFERENCE_LOGPROBS
from llamarl.model_spec import AttentionOptions
from llamarl.train import attention, context_attention, tree_attention
from llamarl.types import Given


def make_branching_documents(
    groups: int = 3, samples: int = 4, seed: int = 0, *, longest: int = 12, opening: int = 0
) -> list[Document]:
    """Answers to the same prompts, in any order, some of them equal or with the same beginning, some with tool replies. All
    prompts begin with the same `opening` tokens."""
    rng = np.random.default_rng(seed)
    first, found = rng.integers(0, VOCABULARY, opening), []
    for _ in range(groups):
        prompt = np.concatenate([first, rng.integers(0, VOCABULARY, rng.integers(1, longest))])
        earlier = list[np.ndarray]()
        for _ in range(samples):
            answer = rng.integers(0, VOCABULARY, rng.integers(1, longest))
            if earlier and rng.random() < 0.4:  # goes on as another answer began, or repeats it
                kept = earlier[rng.integers(len(earlier))]
                answer = np.concatenate([kept[: rng.integers(1, len(kept) + 1)], answer[: rng.integers(0, longest)]])
            earlier.append(answer)
            found.append(_document(rng, prompt, answer))
    return [found[number] for number in rng.permutation(len(found))]


def _document(rng: np.random.Generator, prompt: np.ndarray, answer: np.ndarray) -> Document:
    given: tuple[Given, ...] = ()
    if len(answer) > 4 and rng.random() < 0.3:
        given = (Given(1, 2),)
    sampled = len(answer) - sum(one.count for one in given)
    behavior = rng.normal(-2.5, 1.0, sampled).astype(np.float32)
    return Document(
        tokens=np.concatenate([prompt, answer]).astype(np.int32),
        num_prompt_tokens=len(prompt),
        behavior_logprobs=behavior,
        staleness=np.sort(rng.integers(0, 2, sampled))[::-1].copy(),
        advantages=np.full(sampled, rng.normal(), dtype=np.float32),
        columns={REFERENCE_LOGPROBS: behavior + rng.normal(0, 0.1, sampled).astype(np.float32)},
        given=given,
    )


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Computes tree attention, and that of ranks which share packs, without FlashAttention."""
    with ExitStack() as patches:
        for module in (tree_attention, context_attention):
            patches.enter_context(patch.object(module, "flash_forward", plain_forward))
            patches.enter_context(patch.object(module, "flash_backward", plain_backward))
        for module in (attention, tree_attention):
            patches.enter_context(patch.object(module, "causal_flash", plain_causal))
        yield


@contextmanager
def flash_operations_on_cpu() -> Iterator[None]:
    """The operations themselves, which torch has for GPUs only: compiled graphs hold them as they would on a GPU."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    implement: Any = library.impl
    implement("_flash_attention_forward", _forward_operation, "CPU")
    implement("_flash_attention_backward", _backward_operation, "CPU")
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _forward_operation(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, scale: float | None = None, **options: Any
) -> tuple[Tensor, ...]:
    starts_q, starts_k, longest_q, longest_k, _, causal, _ = others
    out, sums, random, unused = plain_forward(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, scale)
    return out.contiguous(), sums.contiguous(), random.to(torch.uint64), unused.new_zeros((), dtype=torch.uint64), out


def _backward_operation(*given: Any, scale: float | None = None, **options: Any) -> tuple[Tensor, ...]:
    starts_q, starts_k, longest_q, longest_k, _, causal, random, unused = given[6:]
    ends = starts_q, starts_k, longest_q, longest_k
    return tuple(one.contiguous() for one in plain_backward(given[:6], *ends, causal, random, unused, scale))


def plain_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    options: AttentionOptions,
) -> Tensor:
    """As FlashAttention aligns them: the last query of a document is at its last key."""
    rows, columns = _runs(starts_q, q.shape[0]), _runs(starts_k, k.shape[0])
    query_Q = torch.arange(q.shape[0]) - starts_q.long()[rows + 1]
    key_K = torch.arange(k.shape[0]) - starts_k.long()[columns + 1]
    mask_QK = (rows[:, None] == columns) & (key_K <= query_Q[:, None])
    if options.window:
        mask_QK &= key_K > query_Q[:, None] - options.window
    scores_HQK = torch.einsum("qhd,khd->hqk", q, _for_each_head(k, q)) * _scale(q, options.scale)
    weights_HQK = scores_HQK.masked_fill(~mask_QK, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights_HQK, _for_each_head(v, q))


def plain_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    narrow, (q, k, v) = q.dtype, (_wide(x) for x in (q, k, v))
    scores_HQK = _scores(q, k, starts_q, starts_k, causal, scale, window)
    sums_HQ = scores_HQK.logsumexp(-1)
    out = torch.einsum("hqk,khd->qhd", (scores_HQK - sums_HQ[..., None]).exp(), _for_each_head(v, q))
    return out.to(narrow), sums_HQ, q.new_zeros(2), q.new_zeros(0)


def plain_backward(
    given: tuple[Tensor, ...],
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    random: Tensor,
    unused: Tensor,
    scale: float | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """What FlashAttention computes: weights from the sums that it is given, and the output's share from the output."""
    narrow, (grad, q, k, v, out, sums_HQ) = given[0].dtype, (_wide(x) for x in given)
    assert sums_HQ.is_contiguous(), "the kernel assumes it"
    weights_HQK = (_scores(q, k, starts_q, starts_k, causal, scale, window) - sums_HQ[..., None]).exp()
    of_weights_HQK = torch.einsum("qhd,khd->hqk", grad, _for_each_head(v, q))
    of_scores_HQK = weights_HQK * (of_weights_HQK - (grad * out).sum(-1).t()[..., None]) * _scale(q, scale)
    of_q = torch.einsum("hqk,khd->qhd", of_scores_HQK, _for_each_head(k, q))
    of_k, of_v = torch.einsum("hqk,qhd->khd", of_scores_HQK, q), torch.einsum("hqk,qhd->khd", weights_HQK, grad)
    return of_q.to(narrow), _of_groups(of_k, k).to(narrow), _of_groups(of_v, v).to(narrow)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _scores(
    q: Tensor, k: Tensor, starts_q: Tensor, starts_k: Tensor, causal: bool, scale: float | None, window: int
) -> Tensor:
    rows, columns = (_runs(starts, x.shape[0]) for starts, x in ((starts_q, q), (starts_k, k)))
    mask_QK = rows[:, None] == columns
    if causal:  # the last query of a run sees the last key
        left = [
            starts[1:].long()[run] - torch.arange(len(run)) for starts, run in ((starts_q, rows), (starts_k, columns))
        ]
        mask_QK &= left[1] >= left[0][:, None]
        if window:
            mask_QK &= left[1] < left[0][:, None] + window
    scores_HQK: Tensor = torch.einsum("qhd,khd->hqk", q, _for_each_head(k, q)) * _scale(q, scale)
    return scores_HQK.masked_fill(~mask_QK, -torch.inf)


def _runs(starts: Tensor, size: int) -> Tensor:
    """The run that each token belongs to."""
    return torch.searchsorted(starts[1:].long(), torch.arange(size), right=True)


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _of_groups(x: Tensor, like: Tensor) -> Tensor:
    of_groups: Tensor = x.view(x.shape[0], like.shape[1], -1, x.shape[2]).sum(2)
    return of_groups


def are_covered(starts: Tensor, size: int) -> bool:
    """Whether runs lie one behind another, from the first token to the last."""
    edges = starts.tolist()
    return edges[0] == 0 and edges[-1] == size and all(first <= second for first, second in pairwise(edges))
