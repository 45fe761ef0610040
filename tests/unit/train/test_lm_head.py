"""The chunked head is the plain one: values and gradients, whole or in chunks, fused or in two passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llamarl.train.lm_head import Head, chunked_logprobs, fused_loss

TOKENS, VOCABULARY, WIDTH = 50, 37, 16


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = 0.25 * torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs_NV = torch.log_softmax(hidden.float() @ weight.float().t() / temperature, dim=-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, targets[:, None])[:, 0], entropy_N


def some_loss(logprobs_n: Tensor, entropy_n: Tensor) -> Tensor:
    terms_n = logprobs_n.exp() * 3 + logprobs_n * torch.sin(logprobs_n) + 0.3 * entropy_n**2
    return terms_n.sum() / TOKENS


def plain_gradients(temperature: float, dtype: torch.dtype = torch.float32) -> tuple[float, tuple[Tensor, ...]]:
    hidden, weight, targets = inputs(dtype)
    loss = some_loss(*plain(hidden, weight, targets, temperature))
    return loss.item(), torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [0, 1, 7, TOKENS, 1000])
def test_two_passes_equal_the_plain_head(chunk: int, temperature: float) -> None:
    hidden, weight, targets = inputs()
    loss = some_loss(*chunked_logprobs(hidden, weight, targets, Head(temperature, chunk=chunk)))
    value, expected = plain_gradients(temperature)
    assert loss.item() == pytest.approx(value, abs=1e-5)
    for found, wanted in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [0, 1, 7, TOKENS])
def test_the_fused_way_equals_the_plain_head(chunk: int, temperature: float) -> None:
    hidden, weight, targets = inputs()
    seen: list[slice] = []

    def part_loss(part: slice, logprobs_n: Tensor, entropy_n: Tensor) -> Tensor:
        seen.append(part)
        return some_loss(logprobs_n, entropy_n)

    loss, logprobs, entropy = fused_loss(hidden, weight, targets, part_loss, Head(temperature, chunk=chunk))
    value, expected = plain_gradients(temperature)
    assert loss.item() == pytest.approx(value, abs=1e-5)
    for found, wanted in zip(torch.autograd.grad(2 * loss, (hidden, weight)), expected, strict=True):
        assert torch.allclose(found, 2 * wanted, rtol=1e-5, atol=1e-5)
    wanted_logprobs, wanted_entropy = plain(hidden, weight, targets, temperature)
    assert torch.allclose(logprobs, wanted_logprobs, atol=1e-5)
    assert torch.allclose(entropy, wanted_entropy, atol=1e-5)
    assert [(part.start, part.stop) for part in seen] == [
        (start, min(start + (chunk or TOKENS), TOKENS)) for start in range(0, TOKENS, chunk or TOKENS)
    ]


def test_scores_of_all_tokens_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = inputs()
    rows: list[int] = []
    scores = Head.scores

    def counting(head: Head, part_nC: Tensor, weight_VC: Tensor) -> Tensor:
        rows.append(len(part_nC))
        return scores(head, part_nC, weight_VC)

    monkeypatch.setattr(Head, "scores", counting)
    loss = some_loss(*chunked_logprobs(hidden, weight, targets, Head(chunk=8)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert max(rows) == 8 and sum(rows) == 2 * TOKENS


def test_narrow_operands_make_wide_scores() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, _ = chunked_logprobs(hidden, weight, targets, Head())
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, plain(hidden, weight, targets, 1.0)[0], atol=1e-5)


def test_extreme_scores_stay_numbers() -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = chunked_logprobs(hidden * 1e4, weight, targets, Head())
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all()
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()
