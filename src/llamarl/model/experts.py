"""MLPs that are mixtures of experts: a router chooses a few experts for each token, whose results are added by weight.

Products are grouped (`expert_products.py`): the tokens of each expert lie one behind another, and one product takes all
experts. No shape depends on who was chosen, so that decode steps can be captured and passes compiled. The order of sums is
fixed, too.

Precision is that of `ops.py`: the router and the sum over experts are fp32, products take narrow operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llamarl.model.expert_products import ExpertAdapters, Scales, expert_mlp
from llamarl.model.ops import Stream, fused, scores, settled
from llamarl.model.spread import local_part
from llamarl.model_spec import ModelSpec


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


class Router(nn.Module):
    """Scores of all experts for each token, in fp32."""

    def __init__(self, shape: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden_size))

    def forward(self, x_TC: Tensor) -> Tensor:
        return scores(x_TC, self.weight)


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
        adapters = self.adapters_for(x_TC)
        return expert_mlp(x_TC, gate_up, down, local_TK, weights_TK, self.activation, scales, adapters)

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
