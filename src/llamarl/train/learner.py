"""One update: forward and backward passes over the rollouts of a batch, pack by pack, then an optimizer step, or several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from llamarl.algo.batch import Document, Streams, document_of, make_documents
from llamarl.algo.gae import RETURNS, VALUES
from llamarl.algo.losses import Loss, is_tokenwise
from llamarl.algo.metrics import TokenMeasures, describe_groups, stream_metrics, token_metrics, token_totals
from llamarl.algo.streams import (
    TEACHER_LOGPROBS,
    StreamCounts,
    StreamWeights,
    imitation_stream,
    policy_stream,
    value_stream,
)
from llamarl.config import AlgoConfig, TrainerConfig
from llamarl.train.adapter_check import EffectTolerance, TrainedHash, check_effect
from llamarl.train.balance_loss import BalanceWeight
from llamarl.train.context import join_answers, whole_answers
from llamarl.train.lm_head import PartLoss, TeacherStates, chunked_logprobs, no_loss, taught_loss
from llamarl.train.offload import moved_bytes
from llamarl.train.optimizer import AdamW, gradient_norm
from llamarl.train.packing import PADDING, AnswerPlaces, Pack
from llamarl.train.parallel import complete_gradients, counts_here, sum_over_replicas
from llamarl.train.passes import UpdatePasses, merge_steps
from llamarl.train.policy import Policy
from llamarl.train.routing import RouteSums, RouteTolerance, check_recorded, check_shortfall
from llamarl.train.sent_states import GAP_MAX, SentTeachers, check_states
from llamarl.train.shards import trained
from llamarl.train.speed import UpdateWork, speed_of, synchronize
from llamarl.train.stream_packs import stream_packs
from llamarl.train.teacher import NO_LESSON, Lesson, Teachers
from llamarl.train.token_column import TokenColumn
from llamarl.types import CompletionGroup, RolloutGroup


@dataclass(frozen=True)
class UpdateResult:
    metrics: dict[str, float]  # figures that the seed determines
    timings: dict[str, float]  # figures that depend on the machine
    logprobs: dict[int, tuple[bytes, ...]] = field(default_factory=dict)  # of the wanted groups' rollouts, by ordinal


@dataclass(frozen=True)
class Learned:
    """What the optimizer steps of one update have done."""

    seen: Seen
    metrics: dict[str, float]  # of the tokens
    steps: dict[str, float]  # of the optimizer
    timings: dict[str, float]


class Learner:
    """`tolerance`: what the adapters' effect may differ by on the generators (`adapter_check.py`). `route_tolerance`: how far
    replayed experts may be from the policy's own choice (`routing.py`). `teachers` are policies whose whole distributions are
    learned. Updates before `first_update` leave the weights as they are. `passes` says how many optimizer steps an update
    makes."""

    def __init__(
        self,
        policy: Policy,
        loss: Loss,
        *,
        settings: TrainerConfig,
        algo: AlgoConfig,
        updates: int,
        tolerance: EffectTolerance | None = None,
        weights: StreamWeights | None = None,
        teachers: Teachers | SentTeachers | None = None,
        route_tolerance: RouteTolerance | None = None,
        first_update: int = 0,
        passes: UpdatePasses | None = None,
    ) -> None:
        self.policy, self._loss, self._weights = policy, loss, weights or StreamWeights()
        self._teachers = teachers
        self._first_update, self._passes = first_update, passes or UpdatePasses()
        self._settings, self._algo, self._updates = settings, algo, updates
        self._tolerance, self._route_tolerance = tolerance or EffectTolerance(), route_tolerance or RouteTolerance()
        compiled = policy.computing.compiled
        self.optimizer = AdamW(trained(policy.model), settings, compiled=compiled)
        self._counted_elsewhere = self._find_counted_elsewhere()
        self.hold: Callable[[], float] | None = (
            None  # waits until the weights may change; returns the seconds that this took
        )
        self._held_s = 0.0
        self._offloaded_bytes = 0

    def update(
        self,
        number: int,
        groups: Sequence[RolloutGroup],
        probe: CompletionGroup | None = None,
        wanted: Collection[int] = (),
    ) -> UpdateResult:
        """Turns version `number` into the next. Without tokens to learn from, the weights do not change. The log-probs of
        the `wanted` groups are those of version `number`, from the passes that trained it.
        AdaptersDiffer if a generator has sampled with other adapters, RoutesDiffer if it has recorded other experts,
        StatesDiffer if a teacher has sent the states of other tokens."""
        metrics = describe_groups(groups, self._algo.cut_off_penalty)
        metrics |= check_effect(self.policy, groups if probe is None else [probe], number, self._tolerance)
        if probe is not None:
            metrics |= self._measure_probe(probe, number)
        documents = make_documents(groups, version=number, algo=self._algo, sampled_kl=self._weights.sampled_kl)
        if self.policy.route_format is not None:
            check_recorded(documents)
        if not documents or number < self._first_update:
            return UpdateResult({**metrics, "trained_tokens": 0.0}, {})
        learned = self.learn(number, documents)
        timings, logprobs = learned.timings, {}
        if wanted:
            start_s = time.perf_counter()
            logprobs = learned.seen.logprobs(documents, groups, wanted)
            timings["logprobs_s"] = time.perf_counter() - start_s
        routing = learned.seen.routing.totals(self.policy.computing.mesh).metrics() if learned.seen.routing else {}
        check_shortfall(routing, self._route_tolerance, number)
        check_states(learned.metrics, self.policy.computing.dtype, number)
        return UpdateResult({**learned.metrics, **routing, **metrics, **learned.steps}, timings, logprobs)

    def learn(self, number: int, documents: Sequence[Document]) -> Learned:
        """Makes the optimizer steps of an update from its documents, of which there is at least one. Metrics are those of the
        last pass over them, but for the distance from the generator, which only the first step sees; `seen` is the first
        pass."""
        start_s, held_s = time.perf_counter(), 0.0
        first: Seen | None = None
        metrics: dict[str, float] = {}
        steps: list[dict[str, float]] = []
        work: list[UpdateWork] = []
        for parts in self._passes.parts(number, len(documents)):
            seen = Seen(self.policy, StreamCounts.of(documents))
            for chosen in parts:
                self.accumulate(documents, seen, chosen, moved=bool(steps))
                steps.append(self.step(number, seen.total_loss()))
                held_s += self._held_s
            totals = seen.totals(documents, self._algo.rho)
            work.append(totals.work)
            metrics |= totals.metrics()
            first = first or seen
        assert first is not None
        timings = self._speed(documents, work, start_s)
        if self.hold is not None:
            timings["sync_trainer_s"] = held_s
        return Learned(first, metrics, merge_steps(steps), timings)

    def accumulate(
        self,
        documents: Sequence[Document],
        seen: Seen | None = None,
        chosen: Sequence[int] | None = None,
        *,
        moved: bool = False,
    ) -> Seen:
        """Computes the gradients of one optimizer step, which the optimizer keeps for it: that of all documents, or of those
        with the `chosen` numbers. `moved`: the weights are not those of the version that is trained any more."""
        self.optimizer.zero_grad()
        counts = StreamCounts.of(documents if chosen is None else [documents[number] for number in chosen])
        seen = seen or Seen(self.policy, counts)
        seen.begin_step()
        packs = stream_packs(self.policy, documents, chosen)
        lesson = self._lesson(packs, documents, counts)
        how = self.policy.computing
        balance = BalanceWeight.of(packs, how.balance_loss, how.mesh, how.device)
        with self.optimizer.summing() if len(packs) > 1 else nullcontext():
            for number, pack in enumerate(packs):
                sum_over_replicas(self.policy.model, self.policy.computing.mesh, pack is packs[-1])
                here = pack.to(self.policy.computing.device)
                if moved:
                    here = replace(here, fresh_N=torch.zeros_like(here.fresh_N))
                loss = self._forward(here, seen, counts, lesson.states(number, here))
                if balance is not None and seen.routing is not None:
                    loss = balance.add(loss, seen.routing.take_balance())
                loss.backward()  # type: ignore[no-untyped-call]
                seen.add_loss(loss)
                seen.add_work(here)
                if len(packs) > 1:
                    self.optimizer.collect()
        complete_gradients(self.optimizer.gradients(), self.policy.model, self.policy.computing.mesh)
        return seen

    def _lesson(self, packs: Sequence[Pack], documents: Sequence[Document], counts: StreamCounts) -> Lesson:
        """What teachers say of the packs that ask for one. A KL that is sampled has come with the rollouts."""
        if not counts.teacher or self._weights.sampled_kl:
            return NO_LESSON
        return (self._teachers or Teachers({})).teach(packs, documents, counts.teacher)

    def _forward(self, pack: Pack, seen: Seen, counts: StreamCounts, teacher: TeacherStates | None) -> Tensor:
        hidden_NC = self.policy.hidden(pack, seen.routing)
        if pack.streams.value:
            return self._value_loss(pack, self.policy.values_of(hidden_NC), seen, counts)
        head = replace(self.policy.head, temperature=1.0) if pack.streams.imitation else self.policy.head
        weight_VC = self.policy.head_weight  # after the pass, when FSDP has gathered it
        whole = pack.streams.policy and not is_tokenwise(self._loss)
        if whole:
            logprobs_N, entropy_N = chunked_logprobs(hidden_NC, weight_VC, pack.targets_N, head)
            of, share = whole_answers(pack)
            mesh = self.policy.computing.mesh
            joined = join_answers(logprobs_N, pack, mesh), join_answers(entropy_N, pack, mesh)
            loss = self._part_loss(of, seen, counts, share)(slice(0, of.num_targets), *joined)
        if not whole or teacher is not None:
            part_loss = no_loss if whole else self._part_loss(pack, seen, counts)
            fused, logprobs_N, entropy_N, kl_N, gap_N = taught_loss(
                hidden_NC, weight_VC, pack.targets_N, part_loss, head, teacher
            )
            loss = loss + fused if whole else fused
            if teacher is not None and teacher.logprobs_N is not None:
                seen.add_part(pack, pack.num_targets, {GAP_MAX: gap_N.max()})
        seen.add_tokens(pack, logprobs_N.detach(), entropy_N.detach(), None if teacher is None else kl_N)
        return loss

    def _value_loss(self, pack: Pack, values_N: Tensor, seen: Seen, counts: StreamCounts) -> Tensor:
        before_N, returns_N = pack.columns[VALUES], pack.columns[RETURNS]
        clip = self._weights.value_clip
        loss, metrics = value_stream(values_N, before_N, returns_N, num_tokens=counts.value, clip=clip)
        seen.add_part(pack, pack.num_targets, metrics)
        return loss * (1.0 if pack.counts else 0.0)

    def _part_loss(self, pack: Pack, seen: Seen, counts: StreamCounts, share: float = 1.0) -> PartLoss:
        """The loss of a part of the pack's tokens, in the streams that the pack is in; of it, this rank counts a share."""
        weights, streams = self._weights, pack.streams
        if not streams.policy and not streams.imitation:
            return no_loss
        num_tokens, num_sequences = (
            (counts.imitation, 1) if streams.imitation else (counts.policy, counts.policy_sequences)
        )

        def part_loss(part: slice, logprobs_n: Tensor, entropy_n: Tensor) -> Tensor:
            tokens = pack.tokens(part, logprobs_n, entropy_n, num_tokens=num_tokens, num_sequences=num_sequences)
            if streams.imitation:
                value = imitation_stream(tokens, weights.imitation)
            else:
                taught = weights.sampled_kl if streams.teacher else 0.0
                value, metrics = policy_stream(self._loss, tokens, self._algo, sampled_kl=taught)
                seen.add_part(pack, share * len(logprobs_n), metrics)
            return value * (share if pack.counts else 0.0)

        return part_loss

    def step(self, number: int, loss: Tensor | float) -> dict[str, float]:
        """Takes the optimizer's step. If the loss or a gradient is not finite, weights and optimizer keep every bit."""
        mesh = self.policy.computing.mesh
        sum_over_ranks = mesh.sum_over_shards if mesh.size > 1 else None
        norm = gradient_norm(self.optimizer.gradients(), self._counts_here, sum_over_ranks)
        first = self._first_update
        lr = learning_rate(self._settings, number - first, self._updates - first)
        value = torch.as_tensor(loss, device=norm.device)
        self._held_s = self.hold() if self.hold is not None else 0.0
        scale = (self._settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        made = self.optimizer.step(lr, scale, torch.isfinite(norm) & torch.isfinite(value))
        self.optimizer.zero_grad()
        return {"loss": value.item(), "grad_norm": norm.item(), "lr": lr, "skipped": float(not made)}

    def adapter_hash(self, types: tuple[torch.dtype, ...]) -> TrainedHash:
        """What hashes the adapters as generators hold them, after these changes of type."""
        return TrainedHash(self.policy, types, [name for name in trained(self.policy.model) if self._counts_here(name)])

    def _counts_here(self, name: str) -> bool:
        return name not in self._counted_elsewhere

    def _find_counted_elsewhere(self) -> frozenset[str]:
        """Names of parameters whose shards the first tensor rank that has them counts."""
        mesh, parameters = self.policy.computing.mesh, trained(self.policy.model).items()
        return frozenset(name for name, parameter in parameters if not counts_here(parameter, mesh))

    def _measure_probe(self, probe: CompletionGroup, version: int) -> dict[str, float]:
        """Difference of log-probs between policy and generator on tokens that this same version has sampled; where experts
        are replayed, also without that, and how far they are from the policy's own choice."""
        documents = [document_of(probe.prompt, one, version=version) for one in probe.completions]
        if not documents:
            return {"logprob_gap": 0.0}
        if self.policy.route_format is None:
            return {"logprob_gap": self._logprob_gap(self.policy, documents)}
        check_recorded(documents)
        for one in documents:
            if one.routes is not None:
                self.policy.route_format.check_distinct(one.routes, "probe")
        routing = self.policy.route_sums()
        gap = self._logprob_gap(self.policy, documents, routing)
        found = routing.totals(self.policy.computing.mesh).metrics() if routing else {}
        check_shortfall(found, self._route_tolerance, version)
        return {
            "logprob_gap": gap,
            "logprob_gap_own_routes": self._logprob_gap(self.policy.without_replay(), documents),
            **{f"probe_{name}": value for name, value in found.items() if name.startswith("route_")},
        }

    def _logprob_gap(self, policy: Policy, documents: Sequence[Document], routing: RouteSums | None = None) -> float:
        packs = policy.packs(documents, same_everywhere=True)
        gaps_N = torch.cat([_gaps(policy, pack, routing) for pack in packs]).double()
        total = torch.tensor([gaps_N.sum().item(), len(gaps_N)], dtype=torch.float64)
        gap, count = policy.computing.mesh.sum_over_context(total.to(policy.computing.device)).tolist()
        return float(gap / count)

    def _speed(self, documents: Sequence[Document], passes: Sequence[UpdateWork], start_s: float) -> dict[str, float]:
        how = self.policy.computing
        synchronize(how.device)
        elapsed_s = time.perf_counter() - start_s
        tokens = len(passes) * sum(len(document.tokens) for document in documents)
        work = UpdateWork(sum(one.tokens for one in passes), sum(one.squares for one in passes))
        found = speed_of(self.policy.model.shape, tokens, work, elapsed_s, how.device, how.dtype, how.mesh.size)
        if how.cudnn_from:
            found["cudnn_tokens"] = float(self.policy.cudnn_tokens)
            self.policy.cudnn_tokens = 0
        return found if (moved := self._offloaded_gib()) is None else {**found, "offloaded_gib": moved}

    def _offloaded_gib(self) -> float | None:
        """Activations that this rank has put into host memory since it was asked last; None where that is not wanted."""
        total = moved_bytes(self.policy.model)
        if total is None:
            return None
        found, self._offloaded_bytes = (total - self._offloaded_bytes) / 2**30, total
        return found


def _gaps(policy: Policy, pack: Pack, routing: RouteSums | None) -> Tensor:
    gaps_N = (policy.logprobs(pack, routing).cpu() - pack.behavior_logprobs_N).abs()
    return gaps_N if pack.counts else gaps_N[:0]


OF_LOSS = "loss/"  # prefix of the loss's own sums


@dataclass(frozen=True)
class Totals:
    """Sums and maxima of a pass over an update's documents, still on the device."""

    counts: StreamCounts
    staleness: list[int]
    sum_names: tuple[str, ...]
    max_names: tuple[str, ...]
    sums: Tensor
    maxima: Tensor

    @property
    def work(self) -> UpdateWork:
        """What the passes of all ranks have computed."""
        sums = dict(zip(self.sum_names, self.sums.tolist(), strict=True))
        return UpdateWork(sums["computed_tokens"], sums["computed_squares"])

    def metrics(self) -> dict[str, float]:
        sums = dict(zip(self.sum_names, self.sums.tolist(), strict=True))
        maxima = dict(zip(self.max_names, self.maxima.tolist(), strict=True))
        ratio_max = maxima.pop("ratio_max")
        streams = stream_metrics(sums, self.counts)
        count = self.counts.policy or self.counts.value
        named = ((name.removeprefix(OF_LOSS), value) for name, value in sums.items() if name.startswith(OF_LOSS))
        own = {name: value / count for name, value in named}
        if not self.counts.sampled:
            return {**own, **streams}
        found = token_metrics(sums, ratio_max, self.staleness)
        return {**found, **own, **maxima, **streams}


class Seen:
    """Measures of one pass over an update's documents. They stay on the device until its end, so that the host waits once."""

    def __init__(self, policy: Policy, counts: StreamCounts) -> None:
        self._policy, self._counts = policy, counts
        self._mesh, self._device = policy.computing.mesh, policy.computing.device
        self.routing = policy.route_sums()  # None: the model has no experts
        self._losses: list[Tensor] = []
        self._parts: list[tuple[float, Mapping[str, Tensor | float]]] = []  # tokens, metrics of the loss
        self._tokens: list[TokenMeasures] = []
        self._places: list[AnswerPlaces] = []  # where these tokens belong
        self._streams: list[Streams] = []  # of the tokens of each pack
        self._kl: list[Tensor] = []  # sums of the KL to teachers
        self._work: list[tuple[Tensor, float]] = []  # tokens and squares of each pass

    def begin_step(self) -> None:
        """The losses that follow are those of the next optimizer step."""
        self._losses.clear()

    def add_loss(self, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def add_work(self, pack: Pack) -> None:
        """Counts what a pass has computed, from the rows that went through the model."""
        if pack.is_work:
            squares = sum(node.squares for node in pack.nodes)
            self._work.append(((pack.nodes_RT != PADDING).sum(), float(squares)))

    def add_part(self, pack: Pack, num_tokens: float, metrics: Mapping[str, Tensor | float]) -> None:
        self._parts.append((float(num_tokens) if pack.counts else 0.0, metrics))

    def add_tokens(self, pack: Pack, logprobs_N: Tensor, entropy_N: Tensor, kl_N: Tensor | None = None) -> None:
        if pack.counts:
            self._places.append(pack.places)
            self._streams.append(pack.streams)
            if kl_N is None and TEACHER_LOGPROBS in pack.columns:
                kl_N = logprobs_N - pack.columns[TEACHER_LOGPROBS]  # the k1 estimate
            if kl_N is not None:
                self._kl.append(kl_N.double().sum())
            self._tokens.append(
                TokenMeasures(logprobs_N, pack.behavior_logprobs_N, entropy_N, pack.staleness_N, pack.fresh_N)
            )

    def total_loss(self) -> Tensor:
        """Loss of the optimizer step, summed over ranks (a collective)."""
        return self._mesh.sum_over_batch(torch.stack(self._losses).sum())

    def loss(self) -> float:
        return self.total_loss().item()

    def totals(self, documents: Sequence[Document], rho: float) -> Totals:
        """Totals over all ranks (a collective), without waiting for the device."""
        sampled = [one for one in documents if not one.streams.imitation and not one.streams.value]
        staleness = sorted({int(value) for document in sampled for value in np.unique(document.staleness)})
        sums, ratio_max = token_totals(self._all_tokens(), rho=rho, staleness=staleness)
        weighted, maxima = self._part_totals()
        sums |= {OF_LOSS + name: value for name, value in weighted.items()}
        maxima["ratio_max"] = ratio_max
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        sums["computed_tokens"] = sum((tokens for tokens, _ in self._work), zero)
        sums["computed_squares"] = zero + sum(squares for _, squares in self._work)
        sums["sft_loss"] = sum((-logprobs_N.double().sum() for logprobs_N in self._imitated()), zero)
        sums["teacher_kl"] = sum(self._kl, zero)
        return Totals(
            self._counts,
            staleness,
            tuple(sums),
            tuple(maxima),
            self._mesh.sum_over_batch(torch.stack(list(sums.values()))),
            self._mesh.max_over_batch(torch.stack(list(maxima.values()))),
        )

    def metrics(self, documents: Sequence[Document], rho: float) -> dict[str, float]:
        return self.totals(documents, rho).metrics()

    def logprobs(
        self, documents: Sequence[Document], groups: Sequence[RolloutGroup], wanted: Collection[int]
    ) -> dict[int, tuple[bytes, ...]]:
        """Log-probs of the wanted groups' rollouts, by ordinal (a collective); empty for those that were left out."""
        wanted = frozenset(wanted)
        column = TokenColumn(documents, self._policy, only=[one.source[0] in wanted for one in documents])
        for places, tokens in zip(self._places, self._tokens, strict=True):
            column.fill(places, tokens.policy_logprobs_N)
        found = dict(zip((one.source for one in documents), column.complete(), strict=True))
        return {
            group.ordinal: tuple(found.get((group.ordinal, number), b"") for number in range(len(group.rollouts)))
            for group in groups
            if group.ordinal in wanted
        }

    def _imitated(self) -> Iterator[Tensor]:
        """Log-probs of the data's tokens."""
        for tokens, streams in zip(self._tokens, self._streams, strict=True):
            if streams.imitation:
                yield tokens.policy_logprobs_N

    def _all_tokens(self) -> TokenMeasures:
        """Measures of the tokens that were sampled."""
        empty = torch.zeros(0, device=self._device)
        nothing = TokenMeasures(empty, empty, empty, empty.long(), empty.bool())
        sampled = [one for one, streams in zip(self._tokens, self._streams, strict=True) if not streams.imitation]
        columns = zip(*(vars(one).values() for one in [nothing, *sampled]), strict=True)
        return TokenMeasures(*(torch.cat(values) for values in columns))

    def _part_totals(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Totals of the loss's own metrics: sums weighted by tokens, and maxima of names that end in _max."""
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        for num_tokens, metrics in self._parts:
            for name, metric in metrics.items():
                value = torch.as_tensor(metric, dtype=torch.float64, device=self._device).detach()
                if name.endswith("_max"):
                    value = value if num_tokens else torch.full_like(value, -math.inf)
                    maxima[name] = torch.maximum(maxima.get(name, value), value)
                else:
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value * num_tokens
        return sums, maxima


def learning_rate(settings: TrainerConfig, update: int, updates: int) -> float:
    """Learning rate of an update: linear warm-up, then linear down to `final_lr_share` at the last update."""
    warmup = settings.warmup_updates
    if update < warmup:
        return settings.lr * (update + 1) / warmup
    progress = (update - warmup) / max(1, updates - warmup)
    return settings.lr * (1 - (1 - settings.final_lr_share) * progress)
