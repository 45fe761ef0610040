"""Weights between hosts: ranks that publish and ranks that read form a process group, again whenever one is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from llamarl.errors import BrokenWeights, LlamaRLError, LostWeights
from llamarl.model.shards import Parameters
from llamarl.weights.group import Group, PeerLost
from llamarl.weights.group_transport import GroupReader, GroupWriter

AllTrue = Callable[[bool], bool]  # whether all ranks of one executor pass true; every rank calls it


class Rendezvous(Protocol):
    """How an engine on many hosts brings writers and readers together."""

    def serve(self, writer: GroupWriter) -> None:
        """Serve all readers that call from now on."""

    def call(self, number: int, num_readers: int, device: torch.device) -> Group:
        """A group with all ranks that publish. The ranks of one reader call together, each time with the next number."""


class RendezvousReader:
    """A reader that replaces a lost group by a new one at the next load."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        parameters: Parameters,
        device: torch.device,
        *,
        num_readers: int,
        limit_s: float,
        all_true: AllTrue = lambda mine: mine,
    ) -> None:
        self._rendezvous, self._parameters, self._device = rendezvous, parameters, device
        self._num_readers, self._limit_s, self._all_true = num_readers, limit_s, all_true
        self._num_calls = 0
        self._reader: GroupReader | None = None

    def load(self, version: int) -> int:
        num_bytes, problem = 0, None
        try:
            num_bytes = (self._reader or self._connect(version)).load(version)
        except LlamaRLError as error:
            problem = error
        if self._all_true(problem is None):
            return num_bytes
        if self._all_true(not isinstance(problem, LostWeights) and problem is not None):
            raise problem or AssertionError  # all ranks keep their weights and their group
        self._reader = None
        if self._all_true(problem is not None):
            raise LostWeights(str(problem))
        raise BrokenWeights(f"weights: version {version} reached only some of the ranks: {problem or 'not the others'}")

    def _connect(self, version: int) -> GroupReader:
        self._num_calls += 1
        try:
            group = self._rendezvous.call(self._num_calls, self._num_readers, self._device)
            self._reader = GroupReader(group, self._parameters, deadline_s=self._limit_s)
        except (PeerLost, RuntimeError) as error:
            raise LostWeights(f"weights: version {version} cannot be had: {error}") from None
        return self._reader
