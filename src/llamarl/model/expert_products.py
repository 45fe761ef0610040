"""What a token's experts make of it: products by expert, their weighted sum, and its gradients.

All pairs of a token and one of its experts are sorted by expert, so that one product takes all experts. Training keeps the
tokens and the result of the first product, nothing else that has a row for each pair: the backward pass gathers tokens and
applies the activation again. It does not need the experts' results either, since <y, g> = <inner, down^T g> is the gradient
of a weight.

Compiled code sees one operation forward and one backward: it would decide for itself what is kept between operations that it
can see. On a GPU, what lies between products is kernels (`expert_train_kernels.py`), whose plain twins are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from llamarl.errors import ModelError
from llamarl.model.gpu_paths import on_gpu
from llamarl.model.ops import ACTIVATIONS, LARGEST_HALF, inferring, narrowed
from llamarl.model_spec import Activation

_ALIGNED_BYTES = 16  # rows of matrices that torch multiplies in groups are multiples of it
# Each activation of the gate, and its gradient.
_OF_GATE: dict[str, Callable[..., Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
_GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}


class Scales(NamedTuple):
    """Scales of quantized matrices, one for each of their outputs."""

    gate_up_E2I: Tensor
    down_EC: Tensor


class AdapterPair(NamedTuple):
    """A and B beside a matrix of every expert; B has the outputs of the matrix, in one dimension or two."""

    a_ERC: Tensor
    b_ENR: Tensor


class ExpertAdapters(NamedTuple):
    """The adapters of a layer's experts, and the factor of their products."""

    gate_up: AdapterPair
    down: AdapterPair
    scale: float


class Sorted(NamedTuple):
    """The pairs of a token and one of its experts, sorted by expert. Pair p is token p // k."""

    order: Tensor
    """The pair at each place."""
    places: Tensor
    """The place of each pair."""
    ends: Tensor
    """Number of pairs of experts up to each one."""


def sort_by_expert(ids_TK: Tensor, experts: int) -> Sorted:
    sorted_ids, order = torch.sort(ids_TK.flatten(), stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=order.device), right=True)
    return Sorted(order, places, ends.to(torch.int32))


def expert_mlp(
    x_TC: Tensor,
    gate_up_E2IC: Tensor,
    down_ECI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    activation: Activation = "silu",
    scales: Scales | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """The weighted sum of what each token's experts make of it, in fp32 [T, C]. With `scales`, matrices are quantized, and
    there are no gradients; with `adapters`, each expert has some beside its matrices. Ids may be the number of experts, which
    stands for one that another rank holds: nothing is computed for it, and it adds nothing."""
    matrices, factor = [gate_up_E2IC.flatten(1, 2), down_ECI], 1.0
    if adapters is not None:
        matrices += [part.flatten(1, -2) for pair in adapters[:2] for part in pair]
        factor = adapters.scale
    narrow = [one.flatten(1) for one in scales] if scales is not None else []
    if inferring() and not on_gpu(x_TC):
        return _one_by_one(x_TC, ids_TK, weights_TK, _with_what_is_beside(matrices, factor, narrow), activation)
    pairs = sort_by_expert(ids_TK, len(gate_up_E2IC))
    if scales is not None:
        out: Tensor = _experts(x_TC, weights_TK, *pairs, matrices, narrow, factor, activation)[0]
        return out
    out = _ExpertMlp.apply(x_TC, weights_TK, *pairs, factor, activation, *matrices)  # type: ignore[no-untyped-call]
    return out


def _one_by_one(
    x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor, matrices: Sequence[Matrix], activation: str
) -> Tensor:
    """The same, from products of all tokens with each expert that one of them has. On a CPU the number of rows decides how a
    product is rounded: so a token's result does not depend on what the others chose, as a generator's must not."""
    tokens, experts = len(x_TC), len(matrices[0].weight_ENC)
    end_1, y_TKC = torch.tensor([tokens], dtype=torch.int32), x_TC.new_zeros(*ids_TK.shape, x_TC.shape[1])
    for expert in sorted(set(ids_TK.flatten().tolist())):
        if expert < experts:
            gate_up, down = (one.of(expert) for one in matrices)
            y_TC = product(activated(product(x_TC, gate_up, end_1), activation), down, end_1)
            token, place = (ids_TK == expert).nonzero(as_tuple=True)
            y_TKC[token, place] = y_TC[token]
    return (y_TKC.float() * weights_TK[..., None]).sum(1)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        weights_TK: Tensor,
        order: Tensor,
        places: Tensor,
        ends_E: Tensor,
        factor: float,
        activation: str,
        *matrices: Tensor,
    ) -> Tensor:
        out_TC: Tensor
        out_TC, outer_PN = _experts(x_TC, weights_TK, order, places, ends_E, list(matrices), [], factor, activation)
        ctx.save_for_backward(x_TC, weights_TK, outer_PN, order, places, ends_E, *matrices)
        ctx.factor, ctx.activation = factor, activation
        return out_TC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weights_TK, outer_PN, order, places, ends_E, *matrices = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[7:]]
        kept = x_TC, weights_TK, outer_PN, order, places, ends_E, matrices
        made = iter(_experts_backward(grads[0], *kept, ctx.factor, ctx.activation, wanted))
        found = [next(made) if one else None for one in wanted]
        return *found[:2], None, None, None, None, None, *found[2:]


def forward_of_experts(
    x_TC: Tensor,
    weights_TK: Tensor,
    order: Tensor,
    places: Tensor,
    ends_E: Tensor,
    matrices: list[Tensor],
    scales: list[Tensor],
    factor: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """The weighted sum, and the result of the first product of each pair. `matrices` are gate and up as one, and down, and
    then A and B of both if there are adapters."""
    gate_up, down = _with_what_is_beside(matrices, factor, scales)
    k = weights_TK.shape[1]
    outer_PN = product(x_TC.index_select(0, order // k), gate_up, ends_E)
    y_PC = product(activated(outer_PN, activation), down, ends_E)
    return sum_rows(y_PC, places, weights_TK, k, ends_E, torch.float32), outer_PN


def backward_of_experts(
    grad_TC: Tensor,
    x_TC: Tensor,
    weights_TK: Tensor,
    outer_PN: Tensor,
    order: Tensor,
    places: Tensor,
    ends_E: Tensor,
    matrices: list[Tensor],
    factor: float,
    activation: str,
    wanted: list[bool],
) -> list[Tensor]:
    """The wanted gradients, of those of x, weights and matrices. Whatever has a row for each pair is freed as soon as it was
    read."""
    gate_up, down = _with_what_is_beside(matrices, factor)
    of_gate_up, of_down = [wanted[2], *wanted[4:6]], [wanted[3], *wanted[6:]]
    k, dtype, token_P = weights_TK.shape[1], x_TC.dtype, order // weights_TK.shape[1]
    grad_PC = grad_TC.to(dtype).index_select(0, token_P)
    thin_PR = thin_gradient(grad_PC, down, ends_E)
    inner_grad_PI = input_gradient(grad_PC, thin_PR, down, ends_E)
    outer_grad_PN, inner_PI, weights_grad_P = gated_backward(
        outer_PN, inner_grad_PI, weights_TK, order, ends_E, activation
    )
    del inner_grad_PI
    down_grads = weight_gradients(grad_PC, thin_PR, inner_PI, down, ends_E, of_down)
    del grad_PC, inner_PI
    thin_PR = thin_gradient(outer_grad_PN, gate_up, ends_E)
    x_PC = x_TC.index_select(0, token_P) if any(of_gate_up) else None
    gate_up_grads = weight_gradients(outer_grad_PN, thin_PR, x_PC, gate_up, ends_E, of_gate_up)
    del x_PC
    x_grad_TC = None
    if wanted[0]:
        x_grad_PC = input_gradient(outer_grad_PN, thin_PR, gate_up, ends_E)
        del outer_grad_PN
        x_grad_TC = sum_rows(x_grad_PC, places, None, k, ends_E, dtype)
    weights_grad_TK = weights_grad_P.view_as(weights_TK).to(weights_TK.dtype) if wanted[1] else None
    of_pairs = *gate_up_grads[1:], *down_grads[1:]
    every = x_grad_TC, weights_grad_TK, gate_up_grads[0], down_grads[0], *of_pairs
    return [one for one in every if one is not None]


_experts = torch.library.custom_op("llamarl::experts", forward_of_experts, mutates_args=())
_experts_backward = torch.library.custom_op("llamarl::experts_backward", backward_of_experts, mutates_args=())


@_experts.register_fake
def _(
    x_TC: Tensor, weights_TK: Tensor, order: Tensor, places: Tensor, ends_E: Tensor, matrices: list[Tensor], *rest: Any
) -> tuple[Tensor, Tensor]:
    outer_PN = x_TC.new_empty(order.shape[0], matrices[0].shape[1])
    return x_TC.new_empty(x_TC.shape, dtype=torch.float32), outer_PN


@_experts_backward.register_fake
def _(grad_TC: Tensor, x_TC: Tensor, weights_TK: Tensor, *rest: Any) -> list[Tensor]:
    *_, matrices, _factor, _activation, wanted = rest
    leaves = [x_TC, weights_TK, *matrices]
    return [one.new_empty(one.shape) for one, is_wanted in zip(leaves, wanted, strict=True) if is_wanted]


# One matrix of every expert


class Matrix(NamedTuple):
    """A matrix of every expert, and what is beside it: the scales of its outputs if it is quantized, and adapters."""

    weight_ENC: Tensor
    scales_EN: Tensor | None
    pair: AdapterPair | None
    factor: float
    """Of the adapters' product."""

    def of(self, expert: int) -> Matrix:
        """Those of one expert alone."""
        one = slice(expert, expert + 1)
        scales = None if self.scales_EN is None else self.scales_EN[one]
        pair = None if self.pair is None else AdapterPair(*(part[one] for part in self.pair))
        return Matrix(self.weight_ENC[one], scales, pair, self.factor)


def _with_what_is_beside(matrices: Sequence[Tensor], factor: float, scales: Sequence[Tensor] = ()) -> list[Matrix]:
    weights, beside = matrices[:2], matrices[2:]
    pairs = [AdapterPair(*beside[:2]), AdapterPair(*beside[2:])] if beside else [None, None]
    of_outputs = scales or (None, None)
    return [Matrix(*one, factor) for one in zip(weights, of_outputs, pairs, strict=True)]


def product(x_PC: Tensor, matrix: Matrix, ends_E: Tensor) -> Tensor:
    """Rows x of each expert times its own matrix, and its adapters' product; expert e has the rows up to ends[e], and rows
    behind the last one's are not computed: they may hold anything."""
    weight_ENC = matrix.weight_ENC if matrix.scales_EN is None else matrix.weight_ENC.to(x_PC.dtype)
    out_PN = grouped(x_PC, weight_ENC, ends_E, transposed=True)
    if matrix.scales_EN is not None:
        places = torch.arange(len(x_PC), device=x_PC.device)
        of_P = torch.searchsorted(ends_E, places, right=True).clamp(max=len(ends_E) - 1)
        out_PN = (out_PN.float() * matrix.scales_EN.index_select(0, of_P)).to(x_PC.dtype)
    if matrix.pair is None:
        return out_PN
    return out_PN.add_(grouped(_thin(x_PC, matrix, ends_E), matrix.pair.b_ENR, ends_E, transposed=True))


def _thin(x_PC: Tensor, matrix: Matrix, ends_E: Tensor) -> Tensor:
    """A x, times the factor, which is applied where there are fewest numbers."""
    assert matrix.pair is not None
    return grouped(x_PC, matrix.pair.a_ERC, ends_E, transposed=True).mul_(matrix.factor)


def thin_gradient(grad_PN: Tensor, matrix: Matrix, ends_E: Tensor) -> Tensor | None:
    """The gradient of A x; None without adapters."""
    if matrix.pair is None:
        return None
    return grouped(grad_PN, matrix.pair.b_ENR, ends_E, transposed=False).mul_(matrix.factor)


def input_gradient(grad_PN: Tensor, thin_PR: Tensor | None, matrix: Matrix, ends_E: Tensor) -> Tensor:
    """The gradient of x, of that of the product and that of A x."""
    out_PC = grouped(grad_PN, matrix.weight_ENC, ends_E, transposed=False)
    if matrix.pair is None or thin_PR is None:
        return out_PC
    return out_PC.add_(grouped(thin_PR, matrix.pair.a_ERC, ends_E, transposed=False))


def weight_gradients(
    grad_PN: Tensor, thin_PR: Tensor | None, x_PC: Tensor | None, matrix: Matrix, ends_E: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the matrix and, if there are adapters, of A and B; None for those that are not wanted. Only these
    need x."""
    if x_PC is None:
        return [None] * len(wanted)
    found: list[Tensor | None] = [outer_products(grad_PN, x_PC, ends_E) if wanted[0] else None]
    if thin_PR is not None:
        found.append(outer_products(thin_PR, x_PC, ends_E) if wanted[1] else None)
        found.append(outer_products(grad_PN, _thin(x_PC, matrix, ends_E), ends_E) if wanted[2] else None)
    return found


def grouped(x_PC: Tensor, weights: Tensor, ends_E: Tensor, *, transposed: bool) -> Tensor:
    """x of each expert times its matrix [C, N], or that of [N, C] if `transposed`."""
    weight_ECN = weights.transpose(1, 2) if transposed else weights
    if _is_aligned(x_PC, x_PC.shape[1], weight_ECN.shape[2]):
        return torch._grouped_mm(x_PC, weight_ECN, offs=ends_E)
    out = torch.cat([part @ weight for part, weight in zip(_parts(x_PC, ends_E), weight_ECN, strict=True)])
    return F.pad(out, (0, 0, 0, len(x_PC) - len(out)))


def outer_products(grad_PN: Tensor, x_PC: Tensor, ends_E: Tensor) -> Tensor:
    """grad^T x of each expert [E, N, C]; zero for an expert without rows."""
    if _is_aligned(x_PC, x_PC.shape[1], grad_PN.shape[1]):
        # torch writes nothing for an empty group, on some GPUs (pytorch #172439)
        return _zero_unused(torch._grouped_mm(grad_PN.t(), x_PC, offs=ends_E), ends_E)
    return torch.stack([a.t() @ b for a, b in zip(_parts(grad_PN, ends_E), _parts(x_PC, ends_E), strict=True)])


def _zero_unused(out_ENC: Tensor, ends_E: Tensor) -> Tensor:
    """Zero what belongs to experts without rows, in place."""
    if out_ENC.is_cuda:
        from llamarl.model import expert_train_kernels

        return expert_train_kernels.zero_unused(out_ENC, ends_E)
    has_rows_E = ends_E > F.pad(ends_E[:-1], (1, 0))
    return out_ENC.masked_fill_(~has_rows_E[:, None, None], 0.0)


def _is_aligned(x: Tensor, *sizes: int) -> bool:
    """Whether torch's grouped product takes matrices of these sizes. A GPU has nothing else without asking the host."""
    wrong = [size for size in sizes if size * x.element_size() % _ALIGNED_BYTES]
    if wrong and on_gpu(x):
        raise ModelError(
            f"experts on a GPU need sizes that are multiples of {_ALIGNED_BYTES // x.element_size()}; "
            f"this model has one of {wrong[0]}"
        )
    return not wrong


def _parts(x: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    """The rows of each expert that is here."""
    return torch.tensor_split(x, ends_E.cpu().long())[:-1]


# Between products


def activated(outer_PN: Tensor, activation: str) -> Tensor:
    if outer_PN.is_cuda and activation == "silu":
        from llamarl.model import kernels

        return kernels.silu_times(outer_PN)
    return ACTIVATIONS[cast(Activation, activation)][1](outer_PN)


def sum_rows(
    y_PC: Tensor, places: Tensor, weights_TK: Tensor | None, k: int, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """The sum over a token's pairs, in their order, of their rows, each times its weight; summed in fp32 and returned in this
    type [T, C]. Adding by index would be slow, and in any order. Rows that nobody computed add nothing."""
    if y_PC.is_cuda:
        from llamarl.model import expert_train_kernels

        return expert_train_kernels.sum_rows(y_PC, places, weights_TK, k, ends_E, dtype)
    rows_PC = y_PC.index_select(0, places)
    if int(ends_E[-1]) < len(places):
        rows_PC = torch.where((places < ends_E[-1])[:, None], rows_PC, 0.0)
    wide_TKC = rows_PC.view(-1, k, y_PC.shape[1]).float()
    if weights_TK is not None:
        wide_TKC = wide_TKC * weights_TK[..., None]
    return wide_TKC.sum(1).to(dtype)


def gated_backward(
    outer_PN: Tensor, inner_grad_PI: Tensor, weights_TK: Tensor, order: Tensor, ends_E: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of what the activation made, before weights: that of its input, which has them; what it made, times
    weights; and the gradient of each pair's weight, in the order of pairs, 0 where nobody computed the row."""
    if outer_PN.is_cuda and activation == "silu":
        from llamarl.model import expert_train_kernels

        return expert_train_kernels.gated_backward(outer_PN, inner_grad_PI, weights_TK, order, ends_E)
    dtype, (gate_PI, up_PI) = outer_PN.dtype, outer_PN.float().chunk(2, dim=-1)
    weights_P1 = weights_TK.flatten().index_select(0, order).float()[:, None]
    act_PI, grad_PI = _OF_GATE[activation](gate_PI), inner_grad_PI.float()
    wide_PI = act_PI * up_PI
    inner_PI = narrowed(wide_PI, dtype).float()
    is_held_P = torch.arange(len(order), device=order.device) < ends_E[-1]
    of_sorted_P = torch.where(is_held_P, (inner_PI * grad_PI).sum(-1), 0.0)
    weights_grad_P = torch.empty_like(of_sorted_P).index_copy_(0, order, of_sorted_P)
    grad_PI = grad_PI * weights_P1
    if dtype == torch.float16:  # what was bounded has no gradient
        grad_PI = torch.where(wide_PI.abs() <= LARGEST_HALF, grad_PI, 0.0)
    outer_grad_PN = torch.cat((_GRADIENTS[activation](grad_PI * up_PI, gate_PI), grad_PI * act_PI), -1).to(dtype)
    return outer_grad_PN, narrowed(inner_PI * weights_P1, dtype), weights_grad_P
