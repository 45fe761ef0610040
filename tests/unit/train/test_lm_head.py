"""The chunked head is the plain one: values and gradients, whole or in chunks, fused or in two passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llamarl.train import lm_head
from llamarl.train.lm_head import Head, TeacherStates, chunked_logprobs, fused_loss, no_loss, taught_loss

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


# The KL to a teacher

TEACHER_WIDTH, KL_WEIGHT = 24, 0.7


def teacher_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """States and head of a teacher of another width."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, TEACHER_WIDTH, generator=generator)
    return hidden.to(dtype), (0.3 * torch.randn(VOCABULARY, TEACHER_WIDTH, generator=generator)).to(dtype)


def plain_kl(hidden: Tensor, weight: Tensor, temperature: float, forward: float) -> Tensor:
    """KL of every token, from all scores of both in fp32."""
    teacher_hidden, teacher_weight = teacher_inputs(hidden.dtype)
    logp = torch.log_softmax(hidden.float() @ weight.float().t() / temperature, dim=-1)
    logq = torch.log_softmax(teacher_hidden.float() @ teacher_weight.float().t() / temperature, dim=-1)
    reverse = (logp.exp() * (logp - logq)).sum(-1)
    return (1 - forward) * reverse + forward * (logq.exp() * (logq - logp)).sum(-1)


def part_of(losses: bool) -> lm_head.PartLoss:
    return (lambda part, logprobs_n, entropy_n: some_loss(logprobs_n, entropy_n)) if losses else no_loss


@pytest.mark.parametrize("forward", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("losses", [True, False], ids=["beside a loss", "alone"])
@pytest.mark.parametrize("chunk", [0, 7])
def test_the_kl_to_a_teacher_equals_the_plain_one(chunk: int, losses: bool, temperature: float, forward: float) -> None:
    hidden, weight, targets = inputs()
    expected = KL_WEIGHT * plain_kl(hidden, weight, temperature, forward).sum()
    if losses:
        expected = expected + some_loss(*plain(hidden, weight, targets, temperature))
    wanted = torch.autograd.grad(expected, (hidden, weight))
    teacher = TeacherStates(*teacher_inputs(), KL_WEIGHT, forward)
    head = Head(temperature, chunk=chunk)
    loss, logprobs, _, kl, _ = taught_loss(hidden, weight, targets, part_of(losses), head, teacher)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-5)
    for found, one in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
        assert torch.allclose(found, one, rtol=1e-5, atol=1e-5)
    assert torch.allclose(kl, plain_kl(hidden, weight, temperature, forward), atol=1e-5)
    assert torch.allclose(logprobs, plain(hidden, weight, targets, temperature)[0], atol=1e-5)


@pytest.mark.parametrize("rows", [-5, 3])
def test_ids_that_one_head_is_padded_with_are_left_out_or_least_likely(rows: int) -> None:
    hidden, weight, targets = inputs()
    states, head = teacher_inputs()
    kept = head[: len(head) + min(rows, 0)]
    padded = torch.cat([kept, torch.randn(max(rows, 0), head.shape[1])])
    loss, _, _, kl, _ = taught_loss(
        hidden, weight, targets, no_loss, Head(chunk=7), TeacherStates(states, padded, 1.0, 0.3)
    )
    scores = states @ kept.t()
    least = scores.amin(-1, keepdim=True).expand(-1, len(weight) - len(kept))
    logp = torch.log_softmax(hidden @ weight.t(), dim=-1)
    logq = torch.log_softmax(torch.cat([scores, least], -1), dim=-1)
    expected = (torch.lerp(logp.exp() * (logp - logq), logq.exp() * (logq - logp), 0.3)).sum(-1)
    assert torch.allclose(kl, expected, atol=1e-5)
    wanted = torch.autograd.grad(expected.sum(), (hidden, weight))
    for found, one in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
        assert torch.allclose(found, one, rtol=1e-5, atol=1e-5)


def test_a_policy_that_is_its_teacher_has_nothing_to_learn() -> None:
    hidden, weight, targets = inputs()
    teacher = TeacherStates(hidden.detach(), weight.detach(), 1.0, 0.5)
    loss, _, _, kl, _ = taught_loss(hidden, weight, targets, no_loss, Head(), teacher)
    assert kl.abs().max() < 1e-6
    assert all(grad.abs().max() < 1e-6 for grad in torch.autograd.grad(loss, (hidden, weight)))


def test_the_scores_of_policy_and_teacher_exist_for_one_chunk_of_half_the_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lm_head, "_SCORE_BYTES", 4 * VOCABULARY * 20)
    monkeypatch.setattr(lm_head, "_TILE", 1)
    hidden, weight, targets = inputs()
    rows: list[int] = []
    scores = Head.scores

    def counting(head: Head, part_nC: Tensor, weight_VC: Tensor) -> Tensor:
        rows.append(len(part_nC))
        return scores(head, part_nC, weight_VC)

    monkeypatch.setattr(Head, "scores", counting)
    fused_loss(hidden, weight, targets, part_of(True), Head())
    assert rows == [20, 20, 10]
    rows.clear()
    taught_loss(hidden, weight, targets, part_of(True), Head(), TeacherStates(*teacher_inputs(), 1.0))
    assert rows == [10] * 10


def test_narrow_states_of_a_teacher_make_wide_scores() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    teacher = TeacherStates(*teacher_inputs(torch.bfloat16), 1.0)
    kl = taught_loss(hidden, weight, targets, no_loss, Head(), teacher)[3]
    assert torch.allclose(kl, plain_kl(hidden, weight, 1.0, 0.0), atol=1e-5)


@pytest.mark.parametrize("chunk", [0, 7])
def test_policy_and_teacher_each_bound_their_own_scores(chunk: int) -> None:
    """As Gemma and Granite do, beside a teacher whose family does not."""
    hidden, weight, targets = inputs()
    theirs_hidden, theirs_weight = teacher_inputs()
    scores_NV = torch.tanh(hidden @ weight.t() / 2.0 / 1.5) * 1.5 / 0.8
    logp_NV = torch.log_softmax(scores_NV, -1)
    logq_NV = torch.log_softmax(theirs_hidden @ theirs_weight.t() / 4.0 / 0.8, -1)
    kl_N = 0.7 * (logp_NV.exp() * (logp_NV - logq_NV)).sum(-1) + 0.3 * (logq_NV.exp() * (logq_NV - logp_NV)).sum(-1)
    chosen_N = logp_NV.gather(1, targets[:, None])[:, 0]
    expected = KL_WEIGHT * kl_N.sum() + some_loss(chosen_N, -(logp_NV.exp() * logp_NV).sum(-1))
    wanted = torch.autograd.grad(expected, (hidden, weight))
    teacher = TeacherStates(theirs_hidden, theirs_weight, KL_WEIGHT, 0.3, divisor=4.0)
    head = Head(0.8, chunk=chunk, divisor=2.0, softcap=1.5)
    loss, _, _, kl, _ = taught_loss(hidden, weight, targets, part_of(True), head, teacher)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-5)
    assert torch.allclose(kl, kl_N, atol=1e-5)
    for found, one in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
        assert torch.allclose(found, one, rtol=1e-5, atol=1e-5)
