"""The trainer: one batch of rollouts in, one optimizer step, the next version of the policy out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import torch

from llamarl.errors import ModelError
from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import (
    BatchResult,
    Failed,
    Message,
    MustStop,
    PublishWeights,
    Report,
    SaveState,
    StateNotSaved,
    StateSaved,
    WeightsPublished,
    WorkOnBatch,
)
from llamarl.model.adapter_digest import PendingHash
from llamarl.model.transformer import Transformer
from llamarl.train.adapter_check import AdaptersDiffer
from llamarl.train.exchange import Exchange
from llamarl.train.learner import Learner
from llamarl.train.optimizer import AdamW
from llamarl.train.reference import BaseReference, HostedReference
from llamarl.train.state import TrainingState
from llamarl.weights.memory import HOST
from llamarl.weights.overlapped_writer import OverlappedWriter
from llamarl.weights.transport import Publication, WeightWriter

_LOOK_AGAIN_S = 0.005  # the time that one call of `work` waits for a snapshot that is being written


class Trainer:
    """`reference` is given when the reference policy shares these ranks; otherwise its column comes with the rollouts. With
    `tell`, weights are published beside the next passes, and `tell` gets the report when they can be read. Only the policy is
    saved of version `policy_only_at`. With `adapter_types`, the types that adapters change to on their way to a generator,
    their hash is reported with each version."""

    def __init__(
        self,
        learner: Learner,
        weights: WeightWriter,
        *,
        carry_from: Path,
        reference: HostedReference | BaseReference | None = None,
        tell: Callable[[Report], None] | None = None,
        policy_only_at: int | None = None,
        adapter_types: tuple[torch.dtype, ...] = (),
    ) -> None:
        self.learner, self._weights, self._reference = learner, weights, reference
        self._tell = tell or (lambda report: None)
        self._beside = None if tell is None else OverlappedWriter(weights, _gpu(learner))
        if self._beside is not None:
            learner.hold = self._beside.hold
        mesh = learner.policy.computing.mesh
        self._state = TrainingState(self.model, self.optimizer, carry_from, mesh)
        self._policy_only_at = policy_only_at
        self._adapter_hash = learner.adapter_hash(adapter_types) if adapter_types else None
        self._exchange = Exchange(mesh)
        self._pool = ThreadPoolExecutor(1)
        self._saving: tuple[int, Future[dict[str, str]]] | None = None

    @property
    def model(self) -> Transformer:
        return self.learner.policy.model

    @property
    def optimizer(self) -> AdamW:
        return self.learner.optimizer

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnBatch():
                yield self._update(message)
            case PublishWeights() if self._beside is not None:
                self._beside.begin(message.version, partial(self._published, self._begin_hash()), self._not_published)
            case PublishWeights():
                pending = self._begin_hash()
                yield _report(self._weights.publish(message.version), pending)
            case SaveState():
                self._begin_save(message)
            case _:
                raise UnexpectedMessage("trainer", message)

    def _begin_hash(self) -> PendingHash | None:
        """Hash of the adapters that are about to be published."""
        return self._adapter_hash.begin() if self._adapter_hash else None

    def _published(self, pending: PendingHash | None, made: Publication) -> None:
        self._tell(_report(made, pending))

    def _not_published(self, error: Exception) -> None:
        self._tell(Failed(f"weights could not be published: {type(error).__name__}: {error}"))

    def _update(self, message: WorkOnBatch) -> Report:
        groups = message.groups
        if self._reference is not None:
            groups = self._reference.add_column(groups)
        try:
            outcome = self.learner.update(message.update, groups, message.probe, message.wanted)
        except AdaptersDiffer as error:
            return MustStop(str(error))
        return BatchResult(message.update, outcome.metrics, timings=outcome.timings, logprobs=outcome.logprobs)

    @property
    def idle(self) -> bool:
        """An update is made as soon as its batch arrives; only a snapshot is written between messages."""
        return self._saving is None

    def work(self) -> Iterable[Report]:
        """Ranks call this together. The snapshot is saved when the last rank has written its part."""
        if self._saving is None:
            return
        version, written = self._saving
        wait([written], timeout=_LOOK_AGAIN_S)
        if not self._exchange.all_true(written.done()):
            return
        self._saving = None
        files, problem = self._exchange.merge(*_result(written))
        yield StateNotSaved(version, problem) if problem else StateSaved(version, files)

    def _begin_save(self, message: SaveState) -> None:
        """Copy, then write in a thread: the next update waits for the copy only."""
        if self._saving is not None:
            wait([self._saving[1]])  # the controller has given this attempt up
        self._state.take(policy_only=message.version == self._policy_only_at)
        self._saving = (message.version, self._pool.submit(self._state.write, Path(message.folder)))


def _report(made: Publication, pending: PendingHash | None) -> WeightsPublished:
    return WeightsPublished(made.version, made.num_bytes, made.changed, adapters=pending.text() if pending else "")


def _gpu(learner: Learner) -> int:
    device = learner.policy.computing.device
    return (device.index or 0) if device.type == "cuda" else HOST


def _result(written: Future[dict[str, str]]) -> tuple[dict[str, str], str]:
    """The files and their hashes, or the reason why there are none: a full disk stops nothing but the snapshot."""
    try:
        return written.result(), ""
    except (OSError, ModelError) as error:
        return {}, str(error)
