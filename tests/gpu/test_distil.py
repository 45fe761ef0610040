"""The exact KL on a GPU: the values of plain fp32, within the memory of the plain policy loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llamarl.train.lm_head import Head, TeacherStates, fused_loss, taught_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TOKENS, VOCABULARY, WIDTH, TEACHER_WIDTH = 8192, 151_936, 1536, 3584  # Qwen2.5: 1.5B from 7B


def part_loss(part: slice, logprobs_n: Tensor, entropy_n: Tensor) -> Tensor:
    return -logprobs_n.sum() / TOKENS


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((tokens, WIDTH), (VOCABULARY, WIDTH), (tokens, TEACHER_WIDTH), (VOCABULARY, TEACHER_WIDTH))
    made = [0.05 * torch.randn(*shape, device="cuda") for shape in shapes]
    hidden, weight, teacher_hidden, teacher_weight = (one.mul_(8).to(dtype) for one in made)
    targets = torch.randint(VOCABULARY, (tokens,), device="cuda")
    return hidden.requires_grad_(), weight.requires_grad_(), targets, teacher_hidden, teacher_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradients_are_those_of_all_scores_in_fp32(dtype: torch.dtype) -> None:
    hidden, weight, targets, teacher_hidden, teacher_weight = inputs(512, dtype)
    given = torch.log_softmax(teacher_hidden.double() @ teacher_weight.double().t(), -1).gather(1, targets[:, None])[
        :, 0
    ]
    teacher = TeacherStates(teacher_hidden, teacher_weight, 1 / 512, 0.3, logprobs_N=given.float())
    loss, _, _, kl, gap = taught_loss(hidden, weight, targets, part_loss, Head(chunk=128, compiled=True), teacher)
    assert gap.max() < 1e-3, "states and head are those of the log-probs that came"
    found = torch.autograd.grad(loss, (hidden, weight))
    expected_kl, exact = plainly(hidden, weight, targets, teacher_hidden, teacher_weight, torch.float64)
    assert torch.allclose(kl.double(), expected_kl, rtol=1e-5, atol=1e-5)
    _, plain = plainly(hidden, weight, targets, teacher_hidden, teacher_weight, torch.float32)
    for mine, fp32, fp64 in zip(found, plain, exact, strict=True):
        size = float(fp64.abs().max())
        error, of_plain = (float((one.double() - fp64).abs().max()) / size for one in (mine, fp32))
        tolerance = max(1e-5, of_plain) if dtype == torch.float32 else 2e-2  # bf16 gradients are rounded to bf16
        assert error <= tolerance, (error, of_plain)


def plainly(
    hidden: Tensor, weight: Tensor, targets: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The KL of each token and the loss's gradients, with all scores at once."""
    wide = [one.detach().to(dtype).requires_grad_() for one in (hidden, weight)]
    logp = torch.log_softmax(wide[0] @ wide[1].t(), dim=-1)
    logq = torch.log_softmax(teacher_hidden.to(dtype) @ teacher_weight.to(dtype).t(), dim=-1)
    reverse, forward = (logp.exp() * (logp - logq)).sum(-1), (logq.exp() * (logq - logp)).sum(-1)
    kl = 0.7 * reverse + 0.3 * forward
    return kl, torch.autograd.grad(kl.mean() - logp.gather(1, targets[:, None]).sum() / TOKENS, wide)


def peak_bytes(compute: Callable[[], Tensor]) -> int:
    """Memory beyond what is there before, for a forward and a backward pass; the first one compiles."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compute().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak


def test_the_peak_of_memory_is_within_a_fifth_of_the_plain_policy_loss() -> None:
    hidden, weight, targets, teacher_hidden, teacher_weight = inputs(TOKENS, torch.bfloat16)
    teacher = TeacherStates(teacher_hidden, teacher_weight, 1 / TOKENS)
    head = Head(compiled=True)
    plain = peak_bytes(lambda: fused_loss(hidden, weight, targets, part_loss, head)[0])
    hidden.grad = weight.grad = None
    taught = peak_bytes(lambda: taught_loss(hidden, weight, targets, part_loss, head, teacher)[0])
    print(f"plain {plain / 2**30:.2f} GiB, taught {taught / 2**30:.2f} GiB: {taught / plain:.2f}")
    assert taught <= 1.2 * plain
