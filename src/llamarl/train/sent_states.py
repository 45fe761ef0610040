"""A teacher with ranks of its own sends its states to the trainer, which has its head: together they are its whole
distribution, at a small part of the bytes.

States go through a file of the batch, one for each teacher: a row for each sampled token of each answer that it teaches, in
the order of the batch. The teacher's log-probs of the sampled tokens go with the batch itself, another way. The trainer
computes them again from states and head; if they differ, the states are those of other tokens, or the head is another's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarl.algo.batch import Document
from llamarl.algo.streams import TEACHER_LOGPROBS
from llamarl.families.parameters import family_of
from llamarl.io.row_file import BadRowFile, RowFile, RowFileWriter
from llamarl.layout.boxes import chunk
from llamarl.model.checkpoint import open_checkpoint
from llamarl.train.lm_head import Head
from llamarl.train.packing import AnswerPlaces, Pack
from llamarl.train.policy import Policy
from llamarl.train.reference import add_logprobs
from llamarl.train.teacher import FrozenPolicy, Lesson, check_named, token_weights
from llamarl.types import RolloutGroup

GAP_MAX = "teacher_gap_max"  # metric: largest difference between a log-prob that came and the same from states and head
_TOLERANCE, _NARROW_TOLERANCE = 1e-3, 0.25  # sums in another order; narrow numbers, where only one side has them


class StatesDiffer(Exception):
    """What came from a teacher is not about the tokens that are trained."""


def states_file(folder: Path, number: int) -> Path:
    """The file of one teacher's states in the folder of a batch; teachers are numbered in the order of the settings."""
    return folder / f"teacher-{number}"


@dataclass(frozen=True)
class StateRows:
    """Which rows of a teacher's file belong to which answer."""

    first: Mapping[tuple[int, int], int]  # by ordinal and number of the rollout
    total: int

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup]) -> StateRows:
        """For the groups of a batch that the teacher teaches, in the order of the batch."""
        first, total = dict[tuple[int, int], int](), 0
        for group in groups:
            for number, rollout in enumerate(group.rollouts):
                first[group.ordinal, number] = total
                total += rollout.completion.num_tokens
        return cls(first, total)

    def numbers(self, sources: Sequence[tuple[int, int]], places: AnswerPlaces) -> NDArray[np.int64]:
        """The row of each answer token, whose documents have these sources."""
        first = np.array([self.first.get(source, -1) for source in sources], dtype=np.int64)
        found: NDArray[np.int64] = first[places.sequence_N.cpu().numpy()] + places.within_N.cpu().numpy()
        return found


class StateSender:
    """Teachers by name, on ranks of their own."""

    def __init__(self, teachers: Mapping[str, FrozenPolicy]) -> None:
        self._teachers = teachers

    def send(self, groups: Sequence[RolloutGroup], folder: Path) -> tuple[RolloutGroup, ...]:
        """Writes the states of all sampled tokens, each teacher those of its groups. Returns the groups with the teachers'
        log-probs. Ranks share the work."""
        check_named((group.prompt.teacher for group in groups), self._teachers)
        found = {group.ordinal: group for group in groups}
        for number, (name, teacher) in enumerate(self._teachers.items()):
            mine = [group for group in groups if group.prompt.teacher == name]
            if mine:
                with teacher.used() as policy:
                    found |= {one.ordinal: one for one in _send(policy, mine, states_file(folder, number))}
        return tuple(found[group.ordinal] for group in groups)


def _send(policy: Policy, groups: Sequence[RolloutGroup], path: Path) -> tuple[RolloutGroup, ...]:
    rows, mesh = StateRows.of(groups), policy.computing.mesh
    width = policy.model.shape.hidden_size * policy.computing.weight_dtype.itemsize
    writer = RowFileWriter(path, width)

    def keep(sources: Sequence[tuple[int, int]], pack: Pack, hidden_NC: Tensor) -> None:
        if mesh.tensor_rank == 0:  # the others have the same
            writer.put(rows.numbers(sources, pack.places), _as_bytes(hidden_NC))

    try:
        answered = add_logprobs(policy, groups, TEACHER_LOGPROBS, keep)  # its end is a collective: all have written
    finally:
        writer.close()
    if mesh.rank == 0:
        writer.finish(rows.total)
    return answered


def _as_bytes(hidden_NC: Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = hidden_NC.detach().contiguous().cpu().view(torch.uint8).numpy()
    return found


@dataclass(frozen=True)
class TeacherHead:
    """This rank's rows of a teacher's head; with `offload`, in host memory between uses."""

    weight_VC: Tensor
    head: Head

    @classmethod
    def load(cls, folder: Path, policy: Policy, dtype: torch.dtype, *, offload: bool) -> TeacherHead:
        """The head alone, from the teacher's folder. Tensor-parallel ranks have the same rows of it as of the policy's."""
        checkpoint, how = open_checkpoint(folder), policy.computing
        shape, family = checkpoint.shape, family_of(checkpoint.shape)
        name = family.embedding if shape.tied_head else family.head
        box = (chunk(0, shape.vocab_size, how.mesh.tensor, how.mesh.tensor_rank), (0, shape.hidden_size))
        memory = torch.empty(box[0][1] - box[0][0], shape.hidden_size, dtype=dtype)
        checkpoint.fill({name: memory}, lambda spec: box)
        head = Head(how.temperature, policy.head.vocabulary, divisor=shape.logit_divisor, softcap=shape.logit_softcap)
        return cls(memory if offload else memory.to(how.device), head)


class SentTeachers:
    """Teachers whose states come with each batch. `weight` is that of the KL in the loss, `forward` the share of the forward
    KL in it."""

    def __init__(
        self, heads: Mapping[str, TeacherHead], device: torch.device, *, weight: float = 1.0, forward: float = 0.0
    ) -> None:
        self._heads, self._device, self._weight, self._forward = heads, device, weight, forward
        self._folder = Path()
        self._rows: dict[str, StateRows] = {}

    def expect(self, folder: Path, groups: Sequence[RolloutGroup]) -> None:
        """From now on, states are those of this batch."""
        self._folder = folder
        self._rows = {
            name: StateRows.of([group for group in groups if group.prompt.teacher == name]) for name in self._heads
        }
        for group in groups:
            if group.prompt.teacher and any(TEACHER_LOGPROBS not in one.columns for one in group.rollouts):
                raise StatesDiffer(f"teacher: group {group.ordinal} came without the teacher's log-probs")

    def teach(self, packs: Sequence[Pack], documents: Sequence[Document], num_tokens: int) -> Lesson:
        """What is known of the packs that name a teacher. Their states are read when they are needed."""
        check_named((pack.streams.teacher for pack in packs), self._heads)
        sources = [one.source for one in documents]
        names = {pack.streams.teacher for pack in packs} - {""}
        heads = {name: (self._heads[name].weight_VC.to(self._device), self._heads[name].head) for name in names}
        numbers = {name: number for number, name in enumerate(self._heads)}

        def read(number: int) -> Tensor:
            pack, name = packs[number], packs[number].streams.teacher
            wanted = self._rows[name].numbers(sources, pack.places)
            return self._read(states_file(self._folder, numbers[name]), self._rows[name].total, wanted, heads[name][0])

        return Lesson(
            device=self._device,
            hidden=read,
            heads={number: heads[pack.streams.teacher] for number, pack in enumerate(packs) if pack.streams.teacher},
            weights=token_weights(packs, self._weight / num_tokens),
            forward=self._forward,
            compares=True,
        )

    def _read(self, path: Path, total: int, wanted: NDArray[np.int64], weight_VC: Tensor) -> Tensor:
        """States in the type of the head. Where the teacher's device has computed in another, its rows are longer."""
        try:
            with RowFile(path, total) as reader:
                rows, width = reader.take(wanted), weight_VC.shape[1]
                kinds = {width * kind.itemsize: kind for kind in (torch.float32, torch.bfloat16)}
                if reader.row_bytes not in kinds:
                    raise BadRowFile(f"{path}: states of {reader.row_bytes} bytes, and the head is {width} wide")
                states = torch.from_numpy(rows).view(kinds[reader.row_bytes])
        except BadRowFile as error:
            raise StatesDiffer(f"teacher: its states of this batch cannot be read: {error}") from None
        return states.to(weight_VC.dtype)


def check_states(metrics: Mapping[str, float], dtype: torch.dtype, update: int) -> None:
    """Refuses an update whose states were not those of its tokens."""
    gap, allowed = metrics.get(GAP_MAX, 0.0), _TOLERANCE if dtype == torch.float32 else _NARROW_TOLERANCE
    if not gap <= allowed:
        raise StatesDiffer(
            f"teacher: in update {update}, its states and head give other log-probs than it has sent, by up to {gap:.3g} "
            f"({allowed:g} is allowed): they are those of other tokens, or of another model than teacher.path"
        )
