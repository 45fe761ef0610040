"""Frozen policies such as the reference: their log-prob of every answer token is added to the rollouts as a column."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace
from torch import Tensor

from llamarl.algo.batch import document_of
from llamarl.algo.losses import REFERENCE_LOGPROBS
from llamarl.train.packing import Pack
from llamarl.train.policy import Policy
from llamarl.train.token_column import TokenColumn
from llamarl.types import Rollout, RolloutGroup


def add_reference_column(policy: Policy, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
    """Groups with the reference's log-probs added."""
    return add_logprobs(policy, groups, REFERENCE_LOGPROBS)


# keep(sources, pack, hidden_NC): the states of a pack's answer tokens, and the sources of all documents
KeepStates = Callable[[Sequence[tuple[int, int]], Pack, Tensor], None]


def add_logprobs(
    policy: Policy, groups: Sequence[RolloutGroup], name: str, keep: KeepStates | None = None
) -> tuple[RolloutGroup, ...]:
    """Groups with the policy's log-probs added as a column. Ranks share the work; each of them returns all groups. `keep` is
    given the states that the log-probs are computed from."""
    documents = [document_of(group.prompt, one.completion, version=0) for group in groups for one in group.rollouts]
    sources = [(group.ordinal, number) for group in groups for number in range(len(group.rollouts))]
    if not documents:
        return tuple(groups)
    column = TokenColumn(documents, policy)
    for pack in policy.packs(documents):
        hidden_NC, logprobs_N = policy.states_and_logprobs(pack)
        if pack.counts:
            column.fill(pack.places, logprobs_N)
            if keep is not None:
                keep(sources, pack, hidden_NC)
    columns = iter(column.complete())
    return tuple(
        RolloutGroup(group.prompt, tuple(_with_column(one, name, next(columns)) for one in group.rollouts))
        for group in groups
    )


def _with_column(rollout: Rollout, name: str, logprobs: bytes) -> Rollout:
    return replace(rollout, columns={**rollout.columns, name: logprobs})


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
        self._policy, self._adapters = policy.without_replay(), policy.model.adapters

    def add_column(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        with self._adapters.off():
            return add_reference_column(self._policy, groups)
