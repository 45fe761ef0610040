"""The balancing loss of models with experts: it is smallest where routers use all experts equally.

For one pass it is what transformers computes (`load_balancing_loss_func`) of all layers together: the number of experts times
the sum over experts of the share of tokens that took it and the mean probability that routers gave it. Padding counts for
nothing. The experts taken are those of the pass, replayed ones too; gradients go through the probabilities alone. The loss of
an optimizer step is the mean over its passes, weighted by their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llamarl.train.mesh import TrainerMesh
from llamarl.train.packing import PADDING, Pack


class BalanceLoss(NamedTuple):
    """This rank's part of a pass's loss, times the tokens of the pass. Ranks that share a pack add up to the whole of it."""

    sum: Tensor
    num_tokens: Tensor  # of this rank


def balance_loss(probs_LE: Tensor, used_NLK: Tensor, counted_N: Tensor, mesh: TrainerMesh) -> BalanceLoss:
    """The loss of a pass, from the sums of its routers' probabilities and the experts that its tokens took; of tokens, those
    count whose `counted_N` is 1. With context parallelism, a collective of the ranks that share the pack."""
    layers, experts = probs_LE.shape
    tokens = counted_N.sum()
    with torch.no_grad():
        ones_NLK = counted_N[:, None, None].expand(used_NLK.shape)
        counts_E = counted_N.new_zeros(experts).scatter_add_(0, used_NLK.flatten(), ones_NLK.flatten())
        total = mesh.sum_over_context(torch.cat([counts_E, tokens[None]]))
        shares_E = total[:-1] / (layers * total[-1]).clamp(min=1.0)
    return BalanceLoss((shares_E * probs_LE.sum(0)).sum() * (experts / layers), tokens)


class BalanceWeight(NamedTuple):
    """What the balancing loss of each pass of an optimizer step is multiplied with."""

    weight: float
    num_tokens: Tensor  # of all passes on all ranks
    tensor_ranks: int

    @classmethod
    def of(cls, packs: Sequence[Pack], weight: float, mesh: TrainerMesh, device: torch.device) -> BalanceWeight | None:
        """That of a step with these packs on this rank (a collective); None: the loss is switched off."""
        if not weight:
            return None
        real = sum(int((pack.nodes_RT != PADDING).sum()) for pack in packs if pack.is_work)
        total = torch.tensor([float(real)], dtype=torch.float64, device=device)
        return cls(weight, mesh.sum_over_batch(total)[0], mesh.tensor)

    def add(self, loss: Tensor, balance: Tensor) -> Tensor:
        """The loss of a pass with its balancing loss. Every tensor rank computes the routers whole, but their gradients are
        summed over these ranks, as those of experts are: so each one gives its share of it."""
        term = balance * (self.weight / self.num_tokens).to(balance)
        return loss + term / self.tensor_ranks + (term - term / self.tensor_ranks).detach()
