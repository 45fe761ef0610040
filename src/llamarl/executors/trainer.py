"""The trainer: one batch of rollouts in, one optimizer step, the next version of the policy out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from llamarl.executors.executor import UnexpectedMessage
from llamarl.messages import (
    BatchResult,
    Failed,
    Message,
    MustStop,
    Noted,
    PublishWeights,
    Report,
    SaveState,
    WeightsPublished,
    WorkOnBatch,
)
from llamarl.model.adapter_digest import PendingHash
from llamarl.model.transformer import Transformer
from llamarl.routes import RoutesDiffer
from llamarl.train.adapter_check import AdaptersDiffer
from llamarl.train.critic import Critic, OutOfOrder, ValuedBatch
from llamarl.train.learner import Learner, UpdateResult
from llamarl.train.optimizer import AdamW
from llamarl.train.reference import BaseReference, HostedReference
from llamarl.train.sent_states import SentTeachers, StatesDiffer
from llamarl.train.state import TrainingState, critic_state
from llamarl.train.state_saver import StateSaver
from llamarl.train.teacher import Teachers
from llamarl.weights.memory import HOST
from llamarl.weights.overlapped_writer import OverlappedWriter
from llamarl.weights.transport import Publication, WeightWriter


class Trainer:
    """`reference` is given when the reference policy shares these ranks; otherwise its column comes with the rollouts. So are
    `teachers` whose log-probs of sampled tokens are wanted, and the `critic`, whose folder began as a copy of `critic_from`;
    also `teachers` whose states come with each batch. With `tell`, weights are published beside the next passes, and `tell`
    gets the report when they can be read. Only the policy is saved of version `policy_only_at`. With `adapter_types`, the
    types that adapters change to on their way to a generator, their hash is reported with each version. `warm_up` is called
    once between messages, before the first batch."""

    def __init__(
        self,
        learner: Learner,
        weights: WeightWriter,
        *,
        carry_from: Path,
        reference: HostedReference | BaseReference | None = None,
        teachers: Teachers | SentTeachers | None = None,
        critic: Critic | None = None,
        critic_from: Path | None = None,
        tell: Callable[[Report], None] | None = None,
        policy_only_at: int | None = None,
        adapter_types: tuple[torch.dtype, ...] = (),
        warm_up: Callable[[], None] | None = None,
    ) -> None:
        self.learner, self._weights, self._reference = learner, weights, reference
        self._teachers, self._critic = teachers, critic
        self._tell = tell or (lambda report: None)
        self._beside = None if tell is None else OverlappedWriter(weights, _gpu(learner))
        if self._beside is not None:
            learner.hold = self._beside.hold
        mesh = learner.policy.computing.mesh
        states = [TrainingState(self.model, self.optimizer, carry_from, mesh)]
        if critic is not None:
            states.append(critic_state(critic.learner.policy, critic.learner.optimizer, critic_from or carry_from))
        self._saver = StateSaver(states, mesh, policy_only_at=policy_only_at)
        self._adapter_hash = learner.adapter_hash(adapter_types) if adapter_types else None
        self._warm_up, self._published_once, self.preparing = warm_up, False, ""

    @property
    def model(self) -> Transformer:
        return self.learner.policy.model

    @property
    def optimizer(self) -> AdamW:
        return self.learner.optimizer

    def handle(self, message: Message) -> Iterable[Report]:
        match message:
            case WorkOnBatch():
                self._warm_up = None
                yield self._update(message)
            case PublishWeights() if self._beside is not None:
                self._published_once = True
                self._beside.begin(message.version, partial(self._published, self._begin_hash()), self._not_published)
            case PublishWeights():
                pending = self._begin_hash()
                self._published_once = True
                yield _report(self._weights.publish(message.version), pending)
            case SaveState():
                self._saver.begin(message)
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
        if isinstance(self._teachers, Teachers):
            groups = self._teachers.add_column(groups)
        valued = ValuedBatch(tuple(groups))
        try:
            if isinstance(self._teachers, SentTeachers):
                self._teachers.expect(Path(message.folder), groups)
            if self._critic is not None:
                valued = self._critic.work_on(message.update, groups)
            outcome = self.learner.update(message.update, valued.groups, message.probe, message.wanted)
        except (AdaptersDiffer, OutOfOrder, RoutesDiffer, StatesDiffer) as error:
            return MustStop(str(error))
        metrics, timings = _both(outcome, valued)
        columns = () if self._critic is None else valued.groups  # for whoever reads the rollouts
        return BatchResult(message.update, metrics, columns, timings=timings, logprobs=outcome.logprobs)

    @property
    def idle(self) -> bool:
        """An update is made as soon as its batch arrives. Between messages a snapshot is written and, once generators have
        weights to begin with, the passes are compiled."""
        return self._saver.idle and not self._can_warm_up

    @property
    def _can_warm_up(self) -> bool:
        return self._warm_up is not None and self._published_once

    def work(self) -> Iterable[Report]:
        """Ranks call this together."""
        if self._can_warm_up and self._saver.idle:
            yield from self._prepare()
        yield from self._saver.work()

    def _prepare(self) -> Iterable[Report]:
        """One slice says what is being waited for; the next one compiles."""
        if not self.preparing:
            self.preparing = "compile"
            yield Noted("compiling its passes, while the first answers are sampled")
        elif self._warm_up is not None:
            if self._beside is not None:
                self._beside.hold()  # compiling would hold up the thread that publishes, and generators wait for it
            self._warm_up()
            self._warm_up, self.preparing = None, ""


def _report(made: Publication, pending: PendingHash | None) -> WeightsPublished:
    return WeightsPublished(made.version, made.num_bytes, made.changed, adapters=pending.text() if pending else "")


def _gpu(learner: Learner) -> int:
    device = learner.policy.computing.device
    return (device.index or 0) if device.type == "cuda" else HOST


def _both(outcome: UpdateResult, valued: ValuedBatch) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics and timings of the policy's update, and of the critic's before it. Either may have been skipped."""
    if not valued.metrics:
        return outcome.metrics, outcome.timings
    metrics = {**valued.metrics, **outcome.metrics}
    if "skipped" in valued.metrics:
        metrics["skipped"] = max(valued.metrics["skipped"], outcome.metrics.get("skipped", 0.0))
    critic_s = valued.timings.get("compute_s")
    return metrics, outcome.timings if critic_s is None else {**outcome.timings, "critic_s": critic_s}
