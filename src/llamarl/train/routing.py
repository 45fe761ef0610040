"""What the passes of a model with experts tell of its routing: how evenly experts are used, and how far the policy's own
choice is from the experts that it replays.

On tokens that the version being trained has sampled itself, both differ by arithmetic alone. The shortfall of replayed
experts tells by how much: how far the worst of a token's experts is behind the last one that the router itself would take, in
standard deviations of the token's scores. Rounding swaps experts that are about equal, so it makes shortfalls that are small.
A wrong id makes a large one, a shifted row many of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from llamarl.algo.batch import Document
from llamarl.model_spec import ModelSpec
from llamarl.routes import RoutesDiffer
from llamarl.train.balance_loss import BalanceLoss
from llamarl.train.mesh import TrainerMesh
from llamarl.train.packing import PADDING, Pack


class RouteTolerance(Struct, frozen=True):
    """Largest shortfall that arithmetic explains, on average and of a single token in a layer."""

    mean: float = 1e-3
    largest: float = 0.05


NARROW_ROUTES = RouteTolerance(
    2e-3, 0.3
)  # in bf16, 48 layers of 128 experts: 1e-4 and 0.03 (benchmarks/results/logprob_gap.md)
QUANTIZED_ROUTES = RouteTolerance(0.2, math.inf)


class RouteReport(NamedTuple):
    """What a pass tells of each of its N tokens, in each layer with experts."""

    chosen_NLK: Tensor  # experts of the policy's own choice
    shortfall_NL: Tensor  # of the experts that it took

    @classmethod
    def empty(cls, shape: ModelSpec, num_tokens: int, device: torch.device) -> RouteReport:
        """Memory for the report of a pass."""
        layers = len(shape.expert_layers)
        chosen = torch.empty(num_tokens, layers, shape.experts_per_token, dtype=torch.int16, device=device)
        return cls(chosen, torch.empty(num_tokens, layers, dtype=torch.float32, device=device))


class RouteSums:
    """Sums over passes, which stay on the device until they are asked for."""

    def __init__(self, shape: ModelSpec, device: torch.device, *, balances: bool = False) -> None:
        """`balances`: whether passes with gradients also have a balancing loss (`balance_loss.py`)."""
        self.balances = balances
        self._balance: Tensor | None = None
        self.loads_LE = torch.zeros(len(shape.expert_layers), shape.experts, dtype=torch.float64, device=device)
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, pack: Pack, report: RouteReport, *, all_fresh: bool) -> Tensor:
        """Count a pass; returns the experts that its tokens took [N, L, k]. The shortfall is measured where the version being
        trained sampled a token; with `all_fresh`, at all tokens that it read."""
        own_NLK, real_N = report.chosen_NLK.long(), (pack.nodes_RT != PADDING).flatten()
        if not pack.is_work:
            return own_NLK
        if pack.routes_RTLK is None:
            self._count(own_NLK, real_N)
            self._add_sums(tokens=_counted(pack))
            return own_NLK
        routes_NLK = pack.routes_RTLK.flatten(0, 1).long()
        given_N = real_N & (routes_NLK[:, 0, 0] >= 0)
        used_NLK = torch.where(given_N[:, None, None], routes_NLK, own_NLK)
        self._count(used_NLK, real_N)
        differs_NL = (own_NLK.sort(-1)[0] != routes_NLK.sort(-1)[0]).any(-1) & given_N[:, None]
        fresh_N = given_N if all_fresh else given_N & _fresh(pack, given_N)
        shortfall_NL = report.shortfall_NL.double() * fresh_N[:, None]
        self._add_sums(
            replayed=given_N.sum() * differs_NL.shape[1],
            differing=differs_NL.sum(),
            tokens=_counted(pack),
            replayed_tokens=given_N[pack.at_N].sum() * bool(_counted(pack)),
            fresh=fresh_N.sum() * differs_NL.shape[1],
            shortfall=shortfall_NL.sum(),
        )
        self._largest = torch.maximum(self._largest, shortfall_NL.max())
        return used_NLK

    def add_balance(self, found: BalanceLoss) -> None:
        """Keep the balancing loss of the pass that was just counted, until somebody takes it."""
        self._balance = found.sum
        self._add_sums(balance=found.sum.detach(), balanced_tokens=found.num_tokens)

    def take_balance(self) -> Tensor:
        """The balancing loss of the last pass, times its tokens, with gradients."""
        found, self._balance = self._balance, None
        assert found is not None, "a pass with gradients comes before"
        return found

    def _count(self, used_NLK: Tensor, real_N: Tensor) -> None:
        layers, experts = self.loads_LE.shape
        cells = used_NLK + torch.arange(layers, device=used_NLK.device)[:, None] * experts
        ones = real_N[:, None, None].expand(used_NLK.shape).double()
        self.loads_LE.view(-1).scatter_add_(0, cells.flatten(), ones.flatten())

    def _add_sums(self, **values: Tensor | int) -> None:
        for place, name in enumerate(_SUMS):
            self._sums[place] += values.get(name, 0)

    def totals(self, mesh: TrainerMesh) -> RouteTotals:
        """Totals over all ranks (a collective)."""
        flat = mesh.sum_over_batch(torch.cat([self._sums, self.loads_LE.flatten()]))
        sums, loads = flat[: len(_SUMS)], flat[len(_SUMS) :].view_as(self.loads_LE)
        return RouteTotals(sums, loads, mesh.max_over_batch(self._largest))


_SUMS = (
    "replayed",
    "differing",
    "tokens",
    "replayed_tokens",
    "fresh",
    "shortfall",
    "balance",
    "balanced_tokens",
)


def _counted(pack: Pack) -> int:
    """Answer tokens of a pack whose experts should be replayed."""
    return pack.num_targets if pack.counts and not pack.streams.imitation else 0


def _fresh(pack: Pack, given_N: Tensor) -> Tensor:
    """Which tokens predict one that the version being trained has sampled."""
    return torch.zeros_like(given_N).index_put_((pack.at_N,), pack.fresh_N)


class RouteTotals(NamedTuple):
    """Sums of all ranks, still on the device."""

    sums: Tensor
    loads_LE: Tensor
    largest: Tensor

    def metrics(self) -> dict[str, float]:
        """Figures of routing. The load is that of the busiest expert over the mean, in the layer where this is largest."""
        sums = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        loads = self.loads_LE.max(-1)[0] / self.loads_LE.mean(-1).clamp(min=1e-9)
        found = {"expert_load_max": loads.max().item()}
        if sums["replayed"]:
            found["replayed_share"] = sums["replayed_tokens"] / max(1.0, sums["tokens"])
            found["route_diff_share"] = sums["differing"] / sums["replayed"]
        if sums["fresh"]:
            found["route_shortfall"] = sums["shortfall"] / sums["fresh"]
            found["route_shortfall_max"] = self.largest.item()
        if sums["balanced_tokens"]:
            found["balance_loss"] = sums["balance"] / sums["balanced_tokens"]
        return found


def check_shortfall(metrics: dict[str, float], tolerance: RouteTolerance, version: int) -> None:
    """RoutesDiffer if replayed experts are not those that this version has sampled with."""
    mean, largest = metrics.get("route_shortfall", 0.0), metrics.get("route_shortfall_max", 0.0)
    if mean <= tolerance.mean and largest <= tolerance.largest:
        return
    raise RoutesDiffer(
        f"trainer.replay_routes: version {version} would not take the experts that were recorded when it sampled: they are "
        f"behind its own choice by {mean:.2g} of the spread of scores on average and {largest:.2g} at most (arithmetic: "
        f"{tolerance.mean:g} and {tolerance.largest:g}); they are not those of these tokens, or not of these weights"
    )


def check_recorded(documents: Sequence[Document]) -> None:
    """RoutesDiffer if the experts of a sampled answer were not recorded."""
    for one in documents:
        if one.routes is None and not one.streams.imitation:
            raise RoutesDiffer(
                f"group {one.source[0]}: came without the experts that computed it, which trainer.replay_routes needs; set "
                "it to false if something else than LlamaRL's generator has sampled it"
            )
