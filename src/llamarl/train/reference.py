"""The reference policy: its log-prob of every answer token is added to the rollouts as a column."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.algo.batch import document_of
from llamarl.algo.losses import REFERENCE_LOGPROBS
from llamarl.train.policy import Policy
from llamarl.types import Rollout, RolloutGroup


def add_reference_column(policy: Policy, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
    """Groups with the column added. Ranks share the work; each of them returns all groups."""
    documents = [document_of(group.prompt, one.completion, version=0) for group in groups for one in group.rollouts]
    if not documents:
        return tuple(groups)
    lengths = [document.num_answer_tokens for document in documents]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    column_N = torch.zeros(sum(lengths), dtype=torch.float32)
    for pack in policy.packs(documents):
        logprobs_N = policy.logprobs(pack).cpu()
        if pack.counts:
            column_N[_places(pack.sequence_N, starts)] = logprobs_N
    _sum_over_batch(column_N, policy)
    columns = iter(torch.split(column_N, lengths))
    return tuple(
        RolloutGroup(group.prompt, tuple(_with_column(one, next(columns)) for one in group.rollouts))
        for group in groups
    )


def _places(sequence_N: Tensor, starts: Tensor) -> Tensor:
    """Index of each token among the tokens of all documents in order. A pack keeps the tokens of a document together."""
    _, counts = torch.unique_consecutive(sequence_N, return_counts=True)
    within_N = torch.cat([torch.arange(int(count)) for count in counts])
    return starts[sequence_N] + within_N


def _sum_over_batch(column_N: Tensor, policy: Policy) -> None:
    """Sums a column over the ranks that share the documents: each has filled its own tokens, and the others are zero."""
    how = policy.computing
    if how.mesh.batch_ranks > 1:
        column_N.copy_(how.mesh.sum_over_batch(column_N.to(how.device)))


def _with_column(rollout: Rollout, logprobs: Tensor) -> Rollout:
    columns = {**rollout.columns, REFERENCE_LOGPROBS: logprobs.numpy().astype("<f4").tobytes()}
    return Rollout(rollout.completion, rollout.reward, columns)


class HostedReference:
    """A reference on the trainer's ranks. Its weights are in host memory and are copied to the device for each use."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._device = policy.computing.device
        policy.model.to("cpu")

    def add_column(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        self._policy.model.to(self._device)
        try:
            return add_reference_column(self._policy, groups)
        finally:
            self._policy.model.to("cpu")


class BaseReference:
    """A reference that costs no memory: the policy's own base, with its adapters switched off."""

    def __init__(self, policy: Policy) -> None:
        assert policy.model.adapters is not None, "a policy without adapters has no base"
        self._policy, self._adapters = policy, policy.model.adapters

    def add_column(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        with self._adapters.off():
            return add_reference_column(self._policy, groups)
