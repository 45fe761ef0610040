"""MLPs that are mixtures of experts: a router chooses a few experts for each token, whose results are added by weight.

Products are grouped: the tokens of each expert lie one behind another, and one product takes all experts. No shape depends on
who was chosen, so that decode steps can be captured and passes compiled. The order of sums is fixed, too.

Precision is that of `ops.py`: the router and the sum over experts are fp32, products take narrow operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from llamarl.errors import ModelError
from llamarl.model.gpu_paths import on_gpu
from llamarl.model.ops import ACTIVATIONS, Stream, fused, scores, settled
from llamarl.model_spec import Activation, ModelSpec

_ALIGNED_BYTES = 16  # rows of matrices that torch multiplies in groups are multiples of it


def choose(logits_TE: Tensor, k: int) -> Tensor:
    """Ids of the k experts with the highest logits, best first [T, k]; among equals, the lower id."""
    return torch.sort(logits_TE, dim=-1, descending=True, stable=True)[1][:, :k]


def route_weights(logits_TE: Tensor, ids_TK: Tensor, normalize: bool) -> Tensor:
    """Weights of these experts [T, k]: their shares of the softmax over all experts, or over these if `normalize`."""
    if normalize:
        return logits_TE.gather(-1, ids_TK).softmax(-1)
    return logits_TE.softmax(-1).gather(-1, ids_TK)


def shortfall(logits_TE: Tensor, ids_TK: Tensor, own_TK: Tensor) -> Tensor:
    """How far the worst of these experts is behind the last one of the own choice, in standard deviations of the token's
    logits [T]; 0 if all of them would be chosen."""
    behind_T = logits_TE.gather(-1, own_TK[:, -1:])[:, 0] - logits_TE.gather(-1, ids_TK).amin(-1)
    return behind_T / logits_TE.std(-1, correction=0).clamp(min=1e-12)


class OwnChoice(NamedTuple):
    """What a router chooses for each token, whether it is taken or not."""

    ids_BTK: Tensor
    shortfall_BT: Tensor | None
    """See `shortfall`, of the experts that are taken; None: the own ones."""
    probs_E: Tensor | None = None
    """Sum of the router's probabilities over the tokens that count, with gradients; None: nobody asked."""


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
    some_foreign: bool = False,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """The weighted sum of what each token's experts make of it, in fp32 [T, C]. With `scales`, matrices are quantized; with
    `adapters`, each expert has some beside its matrices. With `some_foreign`, ids may be the number of experts, which stands
    for one that another rank holds: nothing is computed for it, and it adds nothing."""
    (tokens, k), experts = ids_TK.shape, len(gate_up_E2IC)
    pairs = sort_by_expert(ids_TK, experts)
    x_PC = _Spread.apply(x_TC, pairs.order, pairs.places, k)  # type: ignore[no-untyped-call]
    if some_foreign:
        x_PC = _held_rows(x_PC, pairs.ends)
    gate_up, down_out = grouped_product, grouped_product
    if scales is not None:
        of_P = ids_TK.flatten().index_select(0, pairs.order).clamp(max=experts - 1)
        gate_up, down_out = (partial(_scaled_product, scales_EN=one.flatten(1), of_P=of_P) for one in scales)
    outer_PN = gate_up(x_PC, gate_up_E2IC.flatten(1, 2), pairs.ends)
    if adapters is not None:
        outer_PN = outer_PN + _low_rank(x_PC, adapters.gate_up, adapters.scale, pairs.ends)
    inner_PI = ACTIVATIONS[activation][1](outer_PN)
    sorted_PC = down_out(inner_PI, down_ECI, pairs.ends)
    if adapters is not None:
        sorted_PC = sorted_PC + _low_rank(inner_PI, adapters.down, adapters.scale, pairs.ends)
    if some_foreign:
        sorted_PC = _held_rows(sorted_PC, pairs.ends)
    out_PC = _Reordered.apply(sorted_PC, pairs.places, pairs.order)  # type: ignore[no-untyped-call]
    out: Tensor = (out_PC.view(tokens, k, -1).float() * weights_TK[..., None]).sum(1)
    return out


def _held_rows(x_PC: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of experts that are here; those behind them are zero, and so are their gradients: no product has written them."""
    is_held_P = torch.arange(len(x_PC), device=x_PC.device) < ends_E[-1]
    return torch.where(is_held_P[:, None], x_PC, 0.0)


def grouped_product(x_PC: Tensor, weight_ENC: Tensor, ends_E: Tensor) -> Tensor:
    """Rows x of each expert times its own matrix; expert e has the rows up to ends[e], and rows behind the last one's are not
    computed: they may hold anything. Differentiable."""
    out: Tensor = _GroupedProduct.apply(x_PC, weight_ENC, ends_E)  # type: ignore[no-untyped-call]
    return out


def _scaled_product(x_PC: Tensor, values_ENC: Tensor, ends_E: Tensor, *, scales_EN: Tensor, of_P: Tensor) -> Tensor:
    """The same with quantized matrices, whose outputs have scales; row p belongs to expert of_P[p]."""
    product_PN = grouped_product(x_PC, values_ENC.to(x_PC.dtype), ends_E)
    return (product_PN.float() * scales_EN.index_select(0, of_P)).to(x_PC.dtype)


def _low_rank(x_PC: Tensor, pair: AdapterPair, scale: float, ends_E: Tensor) -> Tensor:
    """scale * B (A x) of each expert, as `lora.low_rank`."""
    inner_PR = grouped_product(x_PC, pair.a_ERC, ends_E) * scale
    return grouped_product(inner_PR, pair.b_ENR.flatten(1, -2), ends_E)


class _Spread(torch.autograd.Function):
    """A row for each pair of a token and an expert, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.k = k
        return x_TC.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Sums over a token's experts in their order: adding by index would be slow, and in any order."""
        (places,) = ctx.saved_tensors
        of_pairs = grads[0].index_select(0, places).view(-1, ctx.k, grads[0].shape[-1])
        return of_pairs.float().sum(1).to(grads[0].dtype), None, None, None


class _Reordered(torch.autograd.Function):
    """Rows in another order; `back` is the inverse of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PC: Tensor, weight_ENC: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_PC, weight_ENC, ends_E)
        out: Tensor = _grouped(x_PC.contiguous(), weight_ENC, ends_E, True)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_PC, weight_ENC, ends_E = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_weight = _outer(grad, x_PC, ends_E) if ctx.needs_input_grad[1] else None
        return _grouped(grad, weight_ENC, ends_E, False), of_weight, None


@torch.library.custom_op("llamarl::grouped_product", mutates_args=())
def _grouped(x_PC: Tensor, weights: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    """x of each expert times its matrix [C, N], or that of [N, C] if `transposed`. One operation for compiled code, whatever
    it does: torch's own says that it takes bf16 only."""
    weight_ECN = weights.transpose(1, 2) if transposed else weights
    if _is_aligned(x_PC, x_PC.shape[1], weight_ECN.shape[2]):
        return torch._grouped_mm(x_PC, weight_ECN, offs=ends_E)
    out = torch.cat([part @ weight for part, weight in zip(_parts(x_PC, ends_E), weight_ECN, strict=True)])
    return F.pad(out, (0, 0, 0, len(x_PC) - len(out)))


@_grouped.register_fake
def _(x_PC: Tensor, weights: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    return x_PC.new_empty(x_PC.shape[0], weights.shape[1 if transposed else 2])


@torch.library.custom_op("llamarl::grouped_outer", mutates_args=())
def _outer(grad_PN: Tensor, x_PC: Tensor, ends_E: Tensor) -> Tensor:
    """grad^T x of each expert [E, N, C]; zero for an expert without rows."""
    if _is_aligned(x_PC, x_PC.shape[1], grad_PN.shape[1]):
        out = torch._grouped_mm(grad_PN.t(), x_PC, offs=ends_E)
        # torch writes nothing for an empty group, on some GPUs (pytorch #172439)
        has_rows = ends_E > F.pad(ends_E[:-1], (1, 0))
        return out.masked_fill_(~has_rows[:, None, None], 0.0)
    return torch.stack([a.t() @ b for a, b in zip(_parts(grad_PN, ends_E), _parts(x_PC, ends_E), strict=True)])


@_outer.register_fake
def _(grad_PN: Tensor, x_PC: Tensor, ends_E: Tensor) -> Tensor:
    return x_PC.new_empty(ends_E.shape[0], grad_PN.shape[1], x_PC.shape[1])


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


class Router(nn.Module):
    """Scores of all experts for each token, in fp32."""

    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden_size))

    def forward(self, x_TC: Tensor) -> Tensor:
        return scores(x_TC, self.weight)


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


class NarrowExperts(NamedTuple):
    """The matrices of a layer's experts and, if they are quantized, their scales."""

    gate_up_E2IC: Tensor
    down_ECI: Tensor
    scales: Scales | None


class Experts(nn.Module):
    """The weights of the experts of a layer: gate and up [E, 2, I, C], and down [E, C, I]. A rank of several may hold some of
    them, from `first` on, which has the ids that follow; experts of other ranks add nothing here."""

    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        count, inner, hidden = shape.experts, shape.expert_size, shape.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))
        self.activation, self.count, self.first = shape.activation, count, 0
        self.narrow: NarrowExperts | None = None  # what products take instead; see `quantize.py`
        self.beside: Callable[[torch.dtype], ExpertAdapters | None] | None = (
            None  # adapters for such inputs; see `lora.py`
        )

    def forward(self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        gate_up, down, scales = self.taken()
        local_TK = self.local_ids(ids_TK, len(gate_up))
        some_foreign, adapters = len(gate_up) < self.count, self.adapters_for(x_TC)
        return expert_mlp(x_TC, gate_up, down, local_TK, weights_TK, self.activation, scales, some_foreign, adapters)

    def adapters_for(self, x_TC: Tensor) -> ExpertAdapters | None:
        """The adapters that are applied to such inputs, if there are any and they are switched on."""
        return None if self.beside is None else self.beside(x_TC.dtype)

    def taken(self) -> NarrowExperts:
        """The matrices that products take."""
        return self.narrow or NarrowExperts(local_part(self.gate_up_proj), local_part(self.down_proj), None)

    def local_ids(self, ids_TK: Tensor, held: int) -> Tensor:
        """Numbers of these experts among the `held` ones of this rank; `held` itself for those of other ranks."""
        if held == self.count:
            return ids_TK
        local_TK = ids_TK - self.first
        return torch.where((local_TK >= 0) & (local_TK < held), local_TK, held)


def local_part(weight: Tensor) -> Tensor:
    """This rank's experts, and its part of their inner units."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class ExpertMLP(nn.Module):
    """An MLP that is a mixture of experts. Where ranks share the experts, or the inner units of each, `enter` sums the
    gradients of its input over them, and `leave` its result."""

    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        self.gate, self.experts = Router(shape), Experts(shape)
        self.k, self.normalize = shape.experts_per_token, shape.normalize_routes
        self.enter: Callable[[Tensor], Tensor] | None = None
        self.leave: Callable[[Tensor], Tensor] | None = None

    def forward(
        self,
        x_BTC: Tensor,
        residual: Stream,
        routes_BTK: Tensor | None = None,
        report: bool = False,
        counted_BT: Tensor | None = None,
    ) -> Stream | tuple[Stream, OwnChoice]:
        """The residual stream with its result added. `routes_BTK` are ids of experts to take instead of choosing, or negative
        numbers for tokens that choose; weights follow from the router, and so do gradients. With `report`, also what the
        router itself chooses, and with `counted_BT` its probabilities, summed over the tokens where this is 1."""
        x_TC = x_BTC.flatten(0, 1)
        if fused(x_TC) and self.experts.activation == "silu":
            return self._in_kernels(x_TC, settled(residual), routes_BTK, report)
        if self.enter is not None:
            x_TC = self.enter(x_TC)
        logits_TE: Tensor = self.gate(x_TC)
        own_TK = choose(logits_TE.detach(), self.k)
        ids_TK = own_TK if routes_BTK is None else _taken(routes_BTK, own_TK)
        out_TC = self.experts(x_TC, ids_TK, route_weights(logits_TE, ids_TK, self.normalize))
        if self.leave is not None:
            out_TC = self.leave(out_TC)
        stream: Tensor = settled(residual) + out_TC.view(x_BTC.shape)
        if not report:
            return stream
        probs_E = None if counted_BT is None else _counted_probs(logits_TE, counted_BT)
        return stream, _own_choice(logits_TE, ids_TK, own_TK, stream, routes_BTK, probs_E)

    def _in_kernels(
        self, x_TC: Tensor, total_BTC: Tensor, routes_BTK: Tensor | None, report: bool
    ) -> Stream | tuple[Stream, OwnChoice]:
        """The same by kernels, in inference on a GPU. The sum overwrites the residual stream."""
        from llamarl.model import expert_kernels

        logits_TE: Tensor = self.gate(x_TC)
        own_TK, weights_TK = expert_kernels.route(logits_TE, self.k, self.normalize)
        ids_TK = own_TK
        if routes_BTK is not None:
            ids_TK = _taken(routes_BTK, own_TK)
            weights_TK = route_weights(logits_TE, ids_TK, self.normalize)
        part = total_BTC if self.leave is None else torch.zeros_like(total_BTC)
        gate_up, down, scales = self.experts.taken()
        local_TK = self.experts.local_ids(ids_TK, len(gate_up))
        adapters = self.experts.adapters_for(x_TC)
        expert_kernels.add_experts(part.flatten(0, 1), x_TC, gate_up, down, local_TK, weights_TK, scales, adapters)
        stream = part if self.leave is None else total_BTC.add_(self.leave(part))
        return (stream, _own_choice(logits_TE, ids_TK, own_TK, stream, routes_BTK)) if report else stream


def _taken(routes_BTK: Tensor, own_TK: Tensor) -> Tensor:
    """Ids of the given experts, and of the own ones where none are given."""
    given_TK = routes_BTK.flatten(0, 1).long()
    return torch.where(given_TK < 0, own_TK, given_TK)


def _counted_probs(logits_TE: Tensor, counted_BT: Tensor) -> Tensor:
    return (logits_TE.softmax(-1) * counted_BT.flatten()[:, None]).sum(0)


def _own_choice(
    logits_TE: Tensor,
    ids_TK: Tensor,
    own_TK: Tensor,
    stream_BTC: Tensor,
    routes_BTK: Tensor | None,
    probs_E: Tensor | None = None,
) -> OwnChoice:
    shape = stream_BTC.shape[:2]
    behind = None if routes_BTK is None else shortfall(logits_TE.detach(), ids_TK.long(), own_TK.long()).view(shape)
    return OwnChoice(own_TK.view(*shape, -1), behind, probs_E)  # torch 2.11 cannot compile a `_replace` of it
