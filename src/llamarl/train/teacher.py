"""Teachers on the trainer's ranks: frozen policies whose states of an update's tokens are computed before its passes.

A teacher's whole distribution follows from its states and its head (`lm_head.py`), which are smaller than the distributions
by the ratio of vocabulary to width. Where the KL is only sampled, its log-probs of the sampled tokens are a column instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from llamarl.algo.batch import Document
from llamarl.algo.streams import TEACHER_LOGPROBS
from llamarl.train.lm_head import Head, TeacherStates
from llamarl.train.lora import load_adapters
from llamarl.train.packing import Pack
from llamarl.train.policy import Policy
from llamarl.train.reference import add_logprobs
from llamarl.train.shards import trained_shards
from llamarl.types import RolloutGroup


class FrozenPolicy(Protocol):
    def used(self) -> AbstractContextManager[Policy]:
        """The policy, ready for passes inside the block."""


class HostedTeacher:
    """A model of its own. With `offload`, its weights are on the device only while they are used."""

    def __init__(self, policy: Policy, *, offload: bool) -> None:
        self._policy, self._offload = policy, offload
        policy.model.requires_grad_(False)
        if offload:
            policy.model.to("cpu")

    @contextmanager
    def used(self) -> Iterator[Policy]:
        if self._offload:
            self._policy.model.to(self._policy.computing.device)
        try:
            yield self._policy
        finally:
            if self._offload:
                self._policy.model.to("cpu")


class AdapterTeacher:
    """The policy's own base with other adapters, which take the place of the trained ones while they are used."""

    def __init__(self, policy: Policy, folder: Path) -> None:
        assert policy.model.adapters is not None, "a policy without adapters has no base"
        self._policy = policy.without_replay()
        trained = self._copied()
        load_adapters(policy.model, policy.model.adapters.lora, folder)
        self._adapters = self._copied()
        self._put(trained)

    @contextmanager
    def used(self) -> Iterator[Policy]:
        trained = self._copied()
        self._put(self._adapters)
        try:
            yield self._policy
        finally:
            self._put(trained)

    def _copied(self) -> dict[str, Tensor]:
        return {name: shard.tensor.detach().clone() for name, shard in trained_shards(self._policy.model).items()}

    @torch.no_grad()
    def _put(self, adapters: Mapping[str, Tensor]) -> None:
        for name, shard in trained_shards(self._policy.model).items():
            shard.tensor.copy_(adapters[name])


def _nothing(number: int) -> Tensor:
    raise LookupError(f"pack {number} has no teacher")


@dataclass(frozen=True)
class Lesson:
    """The states of an update's packs that have a teacher, by the pack's number. With `compares`, their log-probs are
    compared with those that the teacher itself has given as a column."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    hidden: Callable[[int], Tensor] = _nothing
    heads: Mapping[int, tuple[Tensor, Head]] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    forward: float = 0.0
    compares: bool = False

    def states(self, number: int, pack: Pack) -> TeacherStates | None:
        """For the pack of this number, which is on the device; None: it has no teacher."""
        if number not in self.weights:
            return None
        weight_VC, head = self.heads[number]
        return TeacherStates(
            self.hidden(number).to(self.device, non_blocking=True),
            weight_VC,
            self.weights[number],
            self.forward,
            divisor=head.divisor,
            softcap=head.softcap,
            logprobs_N=pack.columns[TEACHER_LOGPROBS] if self.compares else None,
        )


NO_LESSON = Lesson()  # of an update without teachers, or one whose teachers have given columns


def check_named(asked: Iterable[str], known: Collection[str]) -> None:
    """LookupError if a teacher is asked for that is not there."""
    if missing := set(asked) - {"", *known}:
        raise LookupError(f"no teacher is named '{sorted(missing)[0]}' here, but a group asks for it")


def token_weights(packs: Sequence[Pack], weight: float) -> dict[int, float]:
    """Weight of each token's KL, by the number of the pack, for packs that have a teacher; a filler's is zero."""
    return {number: weight if pack.counts else 0.0 for number, pack in enumerate(packs) if pack.streams.teacher}


class Teachers:
    """Teachers by name. `weight` is that of the KL in the loss, `forward` the share of the forward KL in it."""

    def __init__(self, teachers: Mapping[str, FrozenPolicy], *, weight: float = 1.0, forward: float = 0.0) -> None:
        self._teachers, self._weight, self._forward = teachers, weight, forward

    @torch.no_grad()
    def teach(self, packs: Sequence[Pack], documents: Sequence[Document], num_tokens: int) -> Lesson:
        """Passes of all teachers over the packs that name them; every rank has equally many of each. A token's KL weighs
        `weight` / `num_tokens`. States wait in host memory."""
        check_named((pack.streams.teacher for pack in packs), self._teachers)
        hidden: dict[int, Tensor] = {}
        heads: dict[int, tuple[Tensor, Head]] = {}
        device = torch.device("cpu")
        for name, teacher in self._teachers.items():
            mine = [number for number, pack in enumerate(packs) if pack.streams.teacher == name]
            if not mine:
                continue
            with teacher.used() as policy:
                device = policy.computing.device
                for number in mine:
                    hidden[number] = policy.hidden(packs[number].to(device)).to("cpu")
                head = policy.head_weight.detach().clone(), policy.head
                policy.reshard()  # otherwise only a backward pass would
            heads |= dict.fromkeys(mine, head)
        return Lesson(device, hidden.__getitem__, heads, token_weights(packs, self._weight / num_tokens), self._forward)

    def add_column(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
        """Groups with their teachers' log-probs of the sampled tokens."""
        found = {group.ordinal: group for group in groups}
        for name, teacher in self._teachers.items():
            mine = [group for group in groups if group.prompt.teacher == name]
            if mine:
                with teacher.used() as policy:
                    found |= {one.ordinal: one for one in add_logprobs(policy, mine, TEACHER_LOGPROBS)}
        return tuple(found[group.ordinal] for group in groups)
