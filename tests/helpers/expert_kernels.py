"""Kernels of experts against plain PyTorch; Triton's interpreter runs them on a CPU (TRITON_INTERPRET=1)."""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.model import expert_kernels, expert_train_kernels
from llamarl.model.expert_products import (
    AdapterPair,
    ExpertAdapters,
    Scales,
    expert_mlp,
    gated_backward,
    sort_by_expert,
    sum_rows,
)
from llamarl.model.experts import choose, route_weights
from llamarl.model.quantize import FP8, quantize_rows


def check(tokens: int, experts: int, k: int, inner: int, hidden: int, device: str = "cpu", *, skewed: bool) -> None:
    """fp32, with equal logits among them; skewed: some experts get no token."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = [(tokens, hidden), (experts, 2, inner, hidden), (experts, hidden, inner), (tokens, hidden)]
    x, gate_up, down, total = (torch.randn(size, generator=generator).to(device) * 0.5 for size in sizes)
    logits = torch.randint(-3, 4, (tokens, experts), generator=generator).float().to(device)
    if skewed:
        logits[:, experts // 2 :] -= 10.0
    for normalize in (True, False):
        ids, weights = expert_kernels.route(logits, k, normalize)
        assert torch.equal(ids, choose(logits, k))
        torch.testing.assert_close(weights, route_weights(logits, ids, normalize))
    order, ends = expert_kernels.sort_pairs(ids, experts)
    pairs = sort_by_expert(ids, experts)
    assert torch.equal(order.long(), pairs.order)
    assert torch.equal(ends, pairs.ends)
    given = [one.cpu() for one in (x, gate_up, down, ids, weights)]
    expected = total.cpu() + expert_mlp(given[0], given[1], given[2], given[3], given[4])
    expert_kernels.add_experts(total, x, gate_up, down, ids, weights)
    torch.testing.assert_close(total.cpu(), expected, rtol=1e-4, atol=1e-4)
    for dtype in (torch.int8, FP8):
        check_narrow(total, x, gate_up, down, ids, weights, dtype)
    check_adapters(total, x, gate_up, down, ids, weights, rank=3)
    check_adapters(total, x, gate_up, down, ids, weights, rank=24)
    shared, first = torch.zeros_like(total), experts // 2
    for begin, end in ((0, first), (first, experts)):  # as ranks that hold a half of the experts each
        local = torch.where((ids >= begin) & (ids < end), ids - begin, end - begin)
        part = gate_up[begin:end].contiguous(), down[begin:end].contiguous()
        expert_kernels.add_experts(shared, x, *part, local, weights)
    alone = expert_mlp(given[0], given[1], given[2], given[3], given[4])
    torch.testing.assert_close(shared.cpu(), alone, rtol=1e-4, atol=1e-4)


def check_narrow(
    total: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype
) -> None:
    """The same with quantized matrices."""
    (values_in, scales_in), (values_out, scales_out) = (quantize_rows(one, dtype) for one in (gate_up, down))
    narrow = [one.cpu() for one in (x, values_in, values_out, ids, weights)]
    scales = Scales(scales_in.cpu(), scales_out.cpu())
    expected = total.cpu() + expert_mlp(narrow[0], narrow[1], narrow[2], narrow[3], narrow[4], scales=scales)
    expert_kernels.add_experts(total, x, values_in, values_out, ids, weights, Scales(scales_in, scales_out))
    torch.testing.assert_close(total.cpu(), expected, rtol=1e-4, atol=1e-4)


def check_adapters(
    total: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, *, rank: int
) -> None:
    """The same with adapters beside the matrices, which are wide or quantized."""
    generator = torch.Generator().manual_seed(rank)

    def random_pair(weight: Tensor) -> AdapterPair:
        experts, *outputs, inputs = weight.shape
        sizes = (experts, rank, inputs), (experts, *outputs, rank)
        return AdapterPair(*(torch.randn(size, generator=generator).to(x.device) * 0.2 for size in sizes))

    adapters = ExpertAdapters(random_pair(gate_up), random_pair(down), 0.7)
    on_cpu = [AdapterPair(pair.a_ERC.cpu(), pair.b_ENR.cpu()) for pair in (adapters.gate_up, adapters.down)]
    plain = ExpertAdapters(on_cpu[0], on_cpu[1], 0.7)
    (values_in, scales_in), (values_out, scales_out) = (quantize_rows(one, torch.int8) for one in (gate_up, down))
    for matrices, scales in (((gate_up, down), None), ((values_in, values_out), Scales(scales_in, scales_out))):
        given = [one.cpu() for one in (x, *matrices, ids, weights)]
        theirs = None if scales is None else Scales(*(one.cpu() for one in scales))
        beside = expert_mlp(given[0], given[1], given[2], given[3], given[4], scales=theirs, adapters=plain)
        without = expert_mlp(given[0], given[1], given[2], given[3], given[4], scales=theirs)
        assert (beside - without).abs().max() > 1e-2
        expected = total.cpu() + beside
        expert_kernels.add_experts(total, x, *matrices, ids, weights, scales, adapters)
        torch.testing.assert_close(total.cpu(), expected, rtol=1e-4, atol=1e-4)


def check_training(tokens: int, experts: int, k: int, inner: int, hidden: int, device: str = "cpu") -> None:
    """What lies between products in training. The last expert stands for those of other ranks, whose rows are NaN and have
    NaN for gradients; some values are beyond the range of fp16."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k]
    order, places, ends = sort_by_expert(ids, experts - 1)
    weights, held = torch.rand(tokens, k, generator=generator), int(ends[-1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        outer, grad, y = (torch.randn(tokens * k, size, generator=generator) for size in (2 * inner, inner, hidden))
        outer[0] *= 300.0 if dtype == torch.float16 else 1.0
        for one in (outer, grad, y):
            one[held:] = torch.nan
        outer, grad, y = outer.to(dtype), grad.to(dtype), y.to(dtype)
        given = [one.to(device) for one in (outer, grad, weights, order, ends)]
        found = expert_train_kernels.gated_backward(given[0], given[1], given[2], given[3], given[4])
        expected = gated_backward(outer, grad, weights, order, ends, "silu")
        for mine, other in zip(found[:2], expected[:2], strict=True):
            assert_near(mine[:held], other[:held], dtype)
        assert_near(found[2], expected[2], dtype)
        assert not found[2].cpu()[order[held:]].any()
        for by, out in ((weights, torch.float32), (None, dtype)):
            placed = None if by is None else by.to(device)
            summed = expert_train_kernels.sum_rows(y.to(device), places.to(device), placed, k, given[4], out)
            assert_near(summed, sum_rows(y, places, by, k, ends, out), out)


def check_unused(device: str = "cpu") -> None:
    """Matrices of experts without tokens are zero, whatever was in them, and others keep every bit."""
    for ends in ([0, 0, 3, 3, 7], [2, 2, 2, 2, 2], [1, 2, 3, 4, 5]):
        given = torch.randn(5, 200, 130).to(device)
        given[0, 0, 0] = torch.nan
        found = expert_train_kernels.zero_unused(given.clone(), torch.tensor(ends, dtype=torch.int32, device=device))
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            expected = given[expert] if end > begin else torch.zeros_like(given[expert])
            assert torch.equal(found[expert].nan_to_num(9.0), expected.nan_to_num(9.0)), (ends, expert)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    gap = (found.cpu().double() - expected.double()).norm()
    assert gap <= (1e-5 if dtype == torch.float32 else 0.02) * expected.double().norm(), gap


if __name__ == "__main__":
    for sizes in ((1, 4, 2, 8, 16), (7, 5, 3, 12, 24), (40, 6, 2, 1100, 1030)):
        check_training(*sizes)
    check_unused()
    for skewed in (False, True):
        check(1, 4, 2, 8, 16, skewed=skewed)
        check(7, 5, 2, 12, 24, skewed=skewed)
        check(70, 6, 3, 20, 40, skewed=skewed)
