"""Continuous decoding: a fixed number of slots, refilled as soon as a completion ends.

`step` reads as a sentence: admit what fits, decode a burst, collect what has ended. On a GPU a burst is a graph of several
decode steps, and its results are read while the next one runs, so the device never waits for the host. Weights may change
between two bursts; each token's policy version is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from llamarl.generate.attention import members_of_reading
from llamarl.generate.device_runner import Burst, DeviceRunner, opening_of
from llamarl.generate.drafting import DraftCounts, Drafter, Drafting
from llamarl.generate.drafts import DraftChoice
from llamarl.generate.graphs import Body
from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.limits import (
    AS_THE_MODEL,
    Limits,
    Precision,
    beside_rows,
    check_keys,
    check_stops,
    choose_num_pages,
)
from llamarl.generate.pages import NO_PAGE, PagePool
from llamarl.generate.route_pages import RoutePages, RouteRecorder
from llamarl.generate.scheduler import Scheduler
from llamarl.generate.sequences import (
    AS_ALL_OTHERS,
    NOBODY,
    Admission,
    Extension,
    GroupOptions,
    GroupUnderway,
    Key,
    Running,
    Sampled,
    Sequence,
    make_batch,
)
from llamarl.generate.slots import SlotState
from llamarl.generate.step import Steps
from llamarl.generate.stop_strings import StopStrings
from llamarl.model.lora import Adapters
from llamarl.model.quantize import FP8, quantize
from llamarl.model.transformer import Transformer, fuse
from llamarl.routes import route_format
from llamarl.shape_buckets import padded_tokens
from llamarl.types import (
    Completion,
    CompletionGroup,
    PromptGroup,
    VersionRun,
    floats_to_bytes,
    tokens_to_bytes,
)

_STEPS_BETWEEN_STOPS = 16  # steps between two searches for stop strings in running sequences
_GPU_BURST = 8


class DecodingCounts(NamedTuple):
    """Tokens of drafts, how many of them were right, and tokens of prompts that were read beside answers."""

    drafted: int
    accepted: int
    read_beside: int


@dataclass(frozen=True)
class StreamedTokens:
    """The next tokens of a completion whose group is streamed."""

    key: Key
    sampled: Sampled
    completion: Completion | None = None  # all of it, with its last tokens


class ContinuousDecoder:
    """Decodes groups of completions with one model; see the module's docstring."""

    def __init__(
        self,
        model: Transformer,
        limits: Limits,
        *,
        eos_ids: tuple[int, ...],
        seed: int,
        recompute: bool = False,
        graphs: bool = True,
        tensor_ranks: int = 1,
        precision: Precision = AS_THE_MODEL,
        max_turns: int = 1,
        add_adapters: Callable[[Transformer], Adapters] | None = None,
        stop: StopStrings | None = None,
        drafts: DraftChoice | None = None,
        drafter: Drafter | None = None,
        record_routes: bool = False,
    ) -> None:
        """With `recompute`, running sequences are read again after a change of weights; otherwise their keys and values stay.
        With `max_turns` above 1, a sequence that ends its turn is parked and returned by `take_turns`. A completion ends with
        the token that completes a string of `stop`. `add_adapters` is called with the model once its weights are as they
        stay. With `drafts`, answers are guessed where few run (`drafting.py`), by `drafter` or from their siblings: the same
        tokens come out, sooner. With `record_routes`, completions say which experts computed them (`route_pages.py`)."""
        check_stops(eos_ids, model.shape.vocab_size)
        if precision.kv_cache == "fp8":
            check_keys(model)
        fuse(model)
        self._narrow_weights = quantize(model, precision.weights, keep_wide=precision.keep_wide)
        self._adapters = add_adapters(model) if add_adapters else None
        weight, cache_dtype = model.lm_head.weight, precision.cache_dtype(model)
        form = route_format(model.shape) if record_routes else None
        num_pages = choose_num_pages(limits, model, cache_dtype, tensor_ranks, form)
        cache = PagedCache(
            model.shape,
            num_pages,
            limits.page_tokens,
            dtype=cache_dtype,
            device=weight.device,
            tensor_ranks=tensor_ranks,
            routes=None if form is None else RoutePages(form, num_pages, limits.page_tokens, weight.device),
        )
        self._narrow_cache = cache_dtype == FP8
        state = SlotState(limits.slots, limits.max_new_tokens, eos_ids, weight.device)
        table_SP = torch.full(
            (limits.slots + 1, limits.pages_per_slot), NO_PAGE, dtype=torch.int32, device=weight.device
        )
        steps = Steps(model, cache, state, table_SP, seed=seed, length=padded_tokens(limits.length))
        self.model, self.limits, self._recompute, self._version = model, limits, recompute, -1
        on_gpu = weight.is_cuda
        self.burst_steps = limits.burst or (_GPU_BURST if on_gpu else 1)
        beside = beside_rows(limits, weight.device)
        self._device = DeviceRunner(steps, graphs=graphs, burst_steps=self.burst_steps, beside_rows=beside)
        self._routes = None if form is None else RouteRecorder(form, self._device.read_routes)
        self._schedule = Scheduler(limits.slots, PagePool(num_pages), limits.page_tokens, limits.prefill_tokens, beside)
        self._members = members_of_reading(model.shape.num_heads // model.shape.num_kv_heads)
        self._eos_ids = frozenset(eos_ids)
        self.lookahead = 1 if on_gpu else 0  # bursts that run while the host reads older ones
        self._in_flight: deque[Burst] = deque()
        self._preparations: deque[Body] | None = None  # captures that are left; None: not asked for yet
        self._ready: list[CompletionGroup] = []
        self._collected_tokens = 0
        self._max_turns = max_turns
        self._stop, self._num_steps, self._read_beside = stop or None, 0, 0
        self._turns: list[Sequence] = []
        self._streamed: list[StreamedTokens] = []
        self._drafting = None
        if drafts is not None and drafts.most:
            self._drafting = Drafting(self._schedule, self._device, self._eos_ids, drafts, drafter)
        self._looks = False  # whether any group so far is to be looked at while it runs

    @property
    def narrow_cache(self) -> bool:
        """Whether keys and values are held in fp8."""
        return self._narrow_cache

    @property
    def idle(self) -> bool:
        return self._schedule.idle and not self._ready

    @property
    def decoding(self) -> bool:
        """Whether a step has work to do; False while all unfinished sequences wait for tool replies."""
        return bool(self._schedule.running or self._schedule.num_waiting or self._ready)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot: not started, or paused."""
        return self._schedule.num_waiting

    @property
    def num_running(self) -> int:
        """Number of sequences in slots."""
        return len(self._schedule.running)

    @property
    def cache_share(self) -> float:
        """Share of the cache's pages that are in use."""
        pool = self._schedule.pool
        return 1 - pool.num_free / pool.num_pages

    @property
    def tokens_sampled(self) -> int:
        """Tokens sampled so far by all sequences; those in slots are taken to be still running."""
        running = self._schedule.running.values()
        return self._collected_tokens + sum(one.count_if_running - one.sequence.num_given for one in running)

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """Say that the weights are now those of `version`. To be set between two steps."""
        changed, self._version = version != self._version, version
        self._device.set_version(version)
        for narrow in self._narrow_weights:  # a version may be published again with other bytes
            narrow.refresh()
        if self._adapters is not None:
            self._adapters.refresh()
        if changed and self._recompute:
            self._read_again()

    @torch.inference_mode()
    def prepare(self, *, filtered: bool) -> bool:
        """Capture one more of the graphs that most jobs need; False if there is none left. To be called while idle, so that
        captures do not come in the middle of the work."""
        if self._preparations is None:
            steps, limits = self.burst_steps, self.limits
            lengths = limits.max_prompt_tokens, limits.length
            self._preparations = deque(self._device.preparations(steps, *lengths, filtered=filtered))
        if self._preparations:
            self._preparations.popleft()()
        return bool(self._preparations)

    def add(self, group: PromptGroup, options: GroupOptions = AS_ALL_OTHERS) -> None:
        """Queue a group; its completions start as slots become free. Raises ValueError if it can never be decoded."""
        num_prompt, sampling, limits = len(group.prompt_tokens) // 4, group.sampling, self.limits
        if num_prompt == 0:
            raise ValueError("the prompt is empty")
        if num_prompt > limits.max_prompt_tokens:
            raise ValueError(
                f"the prompt has {num_prompt} tokens; generator.max_prompt_tokens={limits.max_prompt_tokens}"
            )
        if not 1 <= sampling.max_new_tokens <= limits.max_new_tokens or not sampling.samples >= 1:
            raise ValueError(f"{sampling} does not fit slots of {limits.max_new_tokens} new tokens")
        if num_prompt + sampling.max_new_tokens > limits.length:
            raise ValueError(f"{num_prompt} + {sampling.max_new_tokens} tokens; a sequence has at most {limits.length}")
        self._looks |= options.looked_at
        self._schedule.add(group, options)

    @torch.inference_mode()
    def step(self) -> list[CompletionGroup]:
        """Admit what fits, decode one burst, return the groups that are known to be complete."""
        if self._drafting is not None and self._drafting.applies:
            self._step_with(self._drafting)
        else:
            launched = self.launch()
            while len(self._in_flight) > (self.lookahead if launched else 0):
                self._collect()
        self._num_steps += 1
        if self._stop is not None and self._num_steps % _STEPS_BETWEEN_STOPS == 0:
            self._end_stopped(self._stop)
        ready, self._ready = self._ready, []
        return ready

    def _step_with(self, drafting: Drafting) -> None:
        """One step with drafts, or a plain burst where there are none or they do not pay."""
        self._admit()
        while self._in_flight:
            self._collect()
        before, drafted = self.tokens_sampled, drafting.choice.begin() and drafting.applies
        drafted = drafted and self._grow(drafting.choice.most + 1)
        burst = drafting.step(filtered=self._filtered) if drafted else None
        if burst is not None:
            self._in_flight.append(burst)
        else:
            self._make_room()
            self._launch(self._schedule.read_beside(self.burst_steps))
        while self._in_flight:
            self._collect()
        drafting.choice.end(drafted=burst is not None, tokens=self.tokens_sampled - before)

    def take_counts(self) -> DecodingCounts:
        """Counts since the last call."""
        drafts = DraftCounts() if self._drafting is None else self._drafting.take_counts()
        beside, self._read_beside = self._read_beside, 0
        return DecodingCounts(*drafts, beside)

    @property
    def drafting(self) -> Drafting | None:
        return self._drafting

    @torch.inference_mode()
    def launch(self) -> bool:
        """Admit what fits and launch one burst, without a look at its results; False if nothing can run."""
        self._admit()
        self._make_room()
        return self._launch(self._schedule.read_beside(self.burst_steps))

    def _admit(self) -> None:
        admission = self._schedule.admit(self._device.num_bursts, self.burst_steps)
        self._read(admission)
        for running in admission.started:
            self._device.set_pages(running.slot, running.pages)
            if running.sequence.sampled.tokens:
                self._device.put_back(running.slot, running.sequence.sampled)
        self._device.open([opening_of(running) for running in admission.started])

    def _read(self, admission: Admission) -> None:
        """Compute the keys and values that the next burst needs."""
        self._device.fill(admission.fills)
        self._device.extend(admission.extensions)
        self._device.copy_pages(admission.copies)

    def _make_room(self) -> None:
        """Give every running sequence pages for the next burst; if too few are free, pause the youngest."""
        while (grown := self._schedule.grow(self.burst_steps)) is None:
            if self._in_flight:  # a sequence may have ended meanwhile
                self._collect()
            elif not self._schedule.give_up_pages():
                self._pause(self._schedule.youngest)
        for running in grown:
            self._device.set_pages(running.slot, running.pages)

    def _grow(self, steps: int) -> bool:
        """Give every running sequence pages for so many steps, if there are enough."""
        grown = self._schedule.grow(steps)
        for running in grown or ():
            self._device.set_pages(running.slot, running.pages)
        return grown is not None

    @property
    def _filtered(self) -> bool:
        return any(one.sequence.group.prompt.sampling.filtered for one in self._schedule.running.values())

    def _pause(self, running: Running) -> None:
        self._keep_routes([(running, running.max_count)])
        self._schedule.pause(running, self._device.read([running.slot], [running.max_count])[0])
        self._device.close(running.slot)
        self._device.set_pages(running.slot, ())

    def _launch(self, beside: list[Extension] | None = None) -> bool:
        """Launch a burst that also reads what is `beside` it; False if nothing can run, and that is read alone."""
        runners = [running for running in self._schedule.running.values() if running.may_run]
        if not runners:
            self._device.extend(beside or [])
            return False
        filtered = any(running.sequence.group.prompt.sampling.filtered for running in runners)
        batch = make_batch(runners, self._members, self.limits.page_tokens)
        self._in_flight.append(self._device.launch(batch, self.burst_steps, filtered=filtered, beside=beside or ()))
        self._read_beside += sum(len(one.tokens) for one in beside or ())
        for running in runners:
            running.max_count += self.burst_steps
        return True

    def _collect(self) -> None:
        """Take the sequences out of their slots that the oldest burst in flight has ended."""
        burst = self._in_flight.popleft()
        active, counts = burst.wait()
        ended = [
            running
            for running in self._schedule.running.values()
            if running.since <= burst.number and not active[running.slot]
        ]
        slots = [running.slot for running in ended]
        found = self._device.read(slots, [int(counts[slot]) for slot in slots])
        self._keep_routes([(running, int(counts[running.slot])) for running in ended])
        for running, sampled in zip(ended, found, strict=True):
            self._device.set_pages(running.slot, ())
            running.sequence.sampled = sampled
            if self._hands_over(running.sequence):
                self._turns.append(self._schedule.park(running, sampled))
            else:
                self._end_running(running, sampled)
        if self._looks:
            self._look(burst.number, counts)

    def _end_running(self, running: Running, sampled: Sampled) -> None:
        """End a sequence, at its first stop string if it holds one."""
        sequence = running.sequence
        self._keep_routes([(running, len(sampled.tokens))])
        stop = sequence.group.options.stop or self._stop
        end = stop.end_of(sampled.tokens) if stop else None
        if end is not None:
            sampled = sampled.part(0, end)
        sequence.sampled = sampled
        cut_off = end is None and sampled.tokens[-1] not in self._eos_ids
        completion = self._completion(sequence, cut_off=cut_off)
        if sequence.group.options.stream:
            rest = sampled.part(sequence.num_streamed, len(sampled.tokens))
            self._streamed.append(StreamedTokens(sequence.key, rest, completion))
        self._finished(self._schedule.finish(running, completion))

    def _keep_routes(self, running: list[tuple[Running, int]]) -> None:
        """Keep the experts of sequences with so many tokens, before they lose their pages or are read again."""
        if self._routes is not None:
            self._routes.keep(running)

    def _look(self, burst: int, counts: NDArray[np.int64]) -> None:
        """Read what running sequences have sampled until the end of this burst, where that is streamed or may hold a stop
        string of their own."""
        looked = [
            running
            for running in self._schedule.running.values()
            if running.since <= burst and running.sequence.group.options.looked_at
        ]
        slots, starts = [one.slot for one in looked], [len(one.sequence.seen.tokens) for one in looked]
        found = self._device.read(slots, [int(counts[slot]) for slot in slots], starts)
        for running, start, new in zip(looked, starts, found, strict=True):
            self._take_in(running, start, new)

    def _take_in(self, running: Running, start: int, new: Sampled) -> None:
        """Stream new tokens of a running sequence, or end it if they complete a stop string."""
        sequence, options = running.sequence, running.sequence.group.options
        sequence.seen.extend(new)
        if options.stop and options.stop.end_behind(sequence.seen.tokens, start) is not None:
            self._device.close(running.slot)
            self._device.set_pages(running.slot, ())
            self._end_running(running, sequence.seen)
        elif options.stream and new.tokens:
            sequence.num_streamed += len(new.tokens)
            self._streamed.append(StreamedTokens(sequence.key, new))

    def take_streamed(self) -> list[StreamedTokens]:
        """New tokens of streamed groups since the last call. The last ones of a completion come with all of it; its group is
        returned by `step` as well."""
        streamed, self._streamed = self._streamed, []
        return streamed

    def _end_stopped(self, stop: StopStrings) -> None:
        """End the running sequences that hold a stop string. Their completions would be cut there anyway: this saves time."""
        while self._in_flight:
            self._collect()
        running = list(self._schedule.running.values())
        found = self._device.read([one.slot for one in running], [one.max_count for one in running])
        for one, sampled in zip(running, found, strict=True):
            if stop.end_of(sampled.tokens) is not None:
                self._device.close(one.slot)
                self._device.set_pages(one.slot, ())
                self._end_running(one, sampled)

    def _hands_over(self, sequence: Sequence) -> bool:
        """Whether the sequence ended its turn, may have another, and has room for a reply and one more token."""
        more = len(sequence.given) + 1 < self._max_turns and sequence.room >= 2
        return more and sequence.sampled.tokens[-1] in self._eos_ids

    def _finished(self, group: GroupUnderway | None) -> None:
        if group is not None:
            self._ready.append(_in_order(group))
            if self._drafting is not None:
                self._drafting.finish(group)

    def _completion(self, sequence: Sequence, *, cut_off: bool) -> Completion:
        tokens, logprobs, versions = sequence.sampled
        own = [index for index, version in enumerate(versions) if version != NOBODY]
        self._collected_tokens += len(own)
        routes, prompt_routes = self._routes.of(sequence, len(tokens)) if self._routes else (b"", b"")
        return Completion(
            tokens=tokens_to_bytes(tokens),
            behavior_logprobs=floats_to_bytes([logprobs[index] for index in own]),
            versions=tuple(
                VersionRun(version, len(list(run))) for version, run in groupby(versions[index] for index in own)
            ),
            truncated=cut_off,
            given=tuple(sequence.given),
            routes=routes,
            prompt_routes=prompt_routes,
        )

    # Conversations

    def take_turns(self) -> list[Sequence]:
        """Sequences that ended a turn since the last call. Each is parked until `reply` or `end`."""
        turns, self._turns = self._turns, []
        return turns

    def reply(self, key: Key, tokens: list[int]) -> None:
        """Continue a parked conversation with the tokens of a reply. Without room for them it ends, cut off."""
        sequence = self._schedule.parked(key)
        if sequence is None:
            return
        if len(tokens) + 1 > sequence.room:
            self._finished(self._schedule.finish_parked(key, self._completion(sequence, cut_off=True)))
        elif tokens:
            self._schedule.reply(key, tokens)
        else:
            self.end(key)

    def end(self, key: Key) -> None:
        """End a parked conversation."""
        if sequence := self._schedule.parked(key):
            self._finished(self._schedule.finish_parked(key, self._completion(sequence, cut_off=False)))

    def holds(self, ordinal: int) -> bool:
        return self._schedule.holds(ordinal)

    def drop(self, ordinal: int) -> None:
        """Give up a group; none of its completions will be returned."""
        while self._in_flight:
            self._collect()
        if self._drafting is not None:
            self._drafting.drop(ordinal)
        for running in self._schedule.drop(ordinal):
            self._device.close(running.slot)
            self._device.set_pages(running.slot, ())

    @torch.inference_mode()
    def _read_again(self) -> None:
        """Compute keys and values of all running sequences again, with the new weights."""
        while self._in_flight:
            self._collect()
        running = list(self._schedule.running.values())
        counts = [one.max_count for one in running]
        self._keep_routes(list(zip(running, counts, strict=True)))
        for one, sampled in zip(running, self._device.read([one.slot for one in running], counts), strict=True):
            one.sequence.sampled = sampled
        self._schedule.forget_everything_without_a_slot()
        for chunks in self._schedule.read_again():
            self._read(chunks)


def _in_order(group: GroupUnderway) -> CompletionGroup:
    prompt = (
        replace(group.prompt, routes=group.routes) if group.routes and group.prompt.kind != "call" else group.prompt
    )
    return CompletionGroup(prompt, tuple(group.completions[sample] for sample in sorted(group.completions)))
