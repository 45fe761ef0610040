"""The device's side of decoding: fills pages, opens slots, runs bursts, reads what was sampled.

On a GPU only `Burst.wait` and `read` wait for the device. Inputs are copied from pinned memory in the order of the work, and
sampled tokens are read on a stream of their own, beside the next burst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarl.generate.attention import Readings, members_of_reading
from llamarl.generate.beside import BesideInputs
from llamarl.generate.graphs import Body, Graphs
from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.kv_splits import SharedCut, enough_programs, parts_up_to, shared_cut
from llamarl.generate.pages import NO_PAGE
from llamarl.generate.route_pages import CachedSpan
from llamarl.generate.sequences import DecodeBatch, Extension, Fill, Running, Sampled
from llamarl.generate.slots import Opening
from llamarl.generate.step import Steps
from llamarl.model.gpu_paths import upload
from llamarl.shape_buckets import padded_rows, padded_tokens

_SHARING_BYTES = 256 << 20  # bytes saved in a layer; measured on an H200: 58 and 176 MB are a loss, 350 MB a gain
# decode, rows, steps, filtered, parts, how shared pages are read, drafted, with prompts beside
BurstKey = tuple[str, int, int, bool, int, SharedCut | None, bool, bool]
_CHUNK = 256  # tokens that follow cached ones from which they are computed alone
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
EMPTY_BATCH = DecodeBatch([], [], [], [])
PREFILL_ROWS = 16  # on a CPU always so many, since products of fewer rows may round differently


@dataclass(frozen=True)
class Burst:
    """Decode steps that were launched, and the state of each slot after them."""

    number: int
    active: Tensor
    counts: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        if self.done:
            self.done.synchronize()
        return self.active.numpy(), self.counts.numpy()


class DeviceRunner:
    """Runs the decoder's work on one device; see the module's docstring."""

    def __init__(self, steps: Steps, *, graphs: bool, burst_steps: int, beside_rows: int = 0) -> None:
        """`beside_rows`: prompt tokens that each step of a burst of `burst_steps` can read by the way."""
        self._steps, self._state, self._device = steps, steps.state, steps.state.device
        self._on_gpu = self._device.type == "cuda"
        self._graphs = Graphs(self._device, enabled=graphs)
        self._side = torch.cuda.Stream() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._table = np.full(steps.table_SP.shape, NO_PAGE, dtype=np.int32)
        self._table_changed = False
        self._batch = torch.zeros(4, self._state.num_slots, dtype=torch.int64, device=self._device)  # rows: see `_rows`
        self._batch[0] = torch.arange(self._state.num_slots)
        self._prefill_inputs: dict[tuple[int, int], Tensor] = {}
        self._beside = None
        if beside_rows:
            self._beside = BesideInputs(burst_steps, beside_rows, steps.table_SP.shape[1], self._device)
        self.num_bursts = 0

    @property
    def cache(self) -> PagedCache:
        return self._steps.cache

    @property
    def vocab_size(self) -> int:
        return self._steps.model.shape.vocab_size

    def set_version(self, version: int) -> None:
        self._state.version.fill_(version)

    # Into the slots

    def fill(self, fills: Iterable[Fill]) -> None:
        """Compute keys and values of whole sequences."""
        for bucket, rows in _batches(fills):
            self._prefill(bucket, rows)

    def _prefill(self, bucket: int, fills: Sequence[Fill]) -> None:
        rows = 1 << (len(fills) - 1).bit_length() if self._on_gpu else PREFILL_ROWS
        if (rows, bucket) not in self._prefill_inputs:
            self._prefill_inputs[rows, bucket] = torch.zeros(2, rows, bucket, dtype=torch.int64, device=self._device)
        kept_2RT = self._prefill_inputs[rows, bucket]
        key = ("prefill", rows, bucket)

        def run() -> None:
            self._steps.prefill(kept_2RT[0], kept_2RT[1])

        replay = self._graphs.of(key, run, kept_2RT.zero_) if self._graphs.worth(key) else run
        kept_2RT.copy_(upload(self._prefill_rows(fills, rows, bucket), self._device), non_blocking=True)
        replay()

    def _prefill_rows(self, fills: Sequence[Fill], rows: int, bucket: int) -> Tensor:
        """Tokens and the page of each; padding goes to `NO_PAGE`."""
        inputs = np.zeros((2, rows, bucket), dtype=np.int64)
        for row, fill in enumerate(fills):
            count = len(fill.tokens)
            inputs[0, row, :count] = fill.tokens
            inputs[1, row, :count] = np.repeat(fill.pages, self._steps.cache.page_tokens)[:count]
        return torch.from_numpy(inputs)

    def extend(self, extensions: Sequence[Extension]) -> None:
        """Compute keys and values that follow cached ones."""
        chunks = [one for one in extensions if self._is_chunk(one)]
        for one in chunks:
            self._extend_one(one)
        for bucket, rows in _batches(one for one in extensions if not self._is_chunk(one)):
            self._extend(bucket, rows)

    def _is_chunk(self, extension: Extension) -> bool:
        """Whether so many tokens follow that a pass of their own pays, with attention that skips all masked keys."""
        dtype = self._steps.model.lm_head.weight.dtype
        return self._on_gpu and dtype in _FLASH_DTYPES and len(extension.tokens) >= _CHUNK

    def _extend_one(self, extension: Extension) -> None:
        page_tokens, end = self._steps.cache.page_tokens, extension.start + len(extension.tokens)
        positions = np.arange(extension.start, end)
        pages = np.array(extension.pages[: -(-end // page_tokens)])
        inputs = np.stack([np.array(extension.tokens), positions, pages[positions // page_tokens]])
        here, table_P = (upload(torch.from_numpy(array), self._device) for array in (inputs, pages))
        self._steps.extend_one(here[0], here[1], here[2], table_P, end)

    def _extend(self, bucket: int, extensions: Sequence[Extension]) -> None:
        inputs = np.zeros((3, PREFILL_ROWS, bucket), dtype=np.int64)  # tokens, positions, the page of each
        table = np.full((PREFILL_ROWS, self._pages_read(extensions)), NO_PAGE, dtype=np.int64)
        for row, extension in enumerate(extensions):
            count = len(extension.tokens)
            positions = np.arange(extension.start, extension.start + count)
            pages = extension.pages[: table.shape[1]]
            table[row, : len(pages)] = pages
            inputs[0, row, :count], inputs[1, row, :count] = extension.tokens, positions
            inputs[2, row, :count] = table[row, positions // self._steps.cache.page_tokens]
        here, table_RP = (upload(torch.from_numpy(array), self._device) for array in (inputs, table))
        self._steps.extend(here[0], here[1], here[2], table_RP)

    def _pages_read(self, extensions: Sequence[Extension]) -> int:
        """Pages that attention reads: on a CPU always all, so that a row's rounding does not depend on others."""
        if not self._on_gpu:
            return self._table.shape[1]
        longest = max(one.start + len(one.tokens) for one in extensions)
        return min(self._table.shape[1], padded_tokens(-(-longest // self._steps.cache.page_tokens)))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            pages = upload(torch.tensor(copies), self._device)
            self._steps.cache.copy_pages(pages[:, 0], pages[:, 1])

    def open(self, openings: Sequence[Opening]) -> None:
        self._state.open(openings)

    def put_back(self, slot: int, sampled: Sampled, start: int = 0) -> None:
        tokens, logprobs, versions = (torch.tensor(column) for column in sampled)
        self._state.put_back(slot, tokens, logprobs, versions, start)

    def close(self, slot: int) -> None:
        self._state.close(slot)

    def close_all(self, slots: Sequence[int]) -> None:
        """Stop slots, and take their pages from them."""
        self._state.close_all(slots)
        for slot in slots:
            self.set_pages(slot, ())

    def end(self, slot: int) -> None:
        """Stop a slot whose sequence has ended; it keeps its pages until that is collected."""
        self._state.close_all([slot])

    def jump(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Set the lengths of answers, as if so many tokens had been sampled; see `bench/jumping_decoder.py`."""
        if slots:
            self._state.jump(*(upload(torch.tensor(column), self._device) for column in (slots, counts)))

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self._table[slot, : len(pages)] = pages
        self._table[slot, len(pages) :] = NO_PAGE
        self._table_changed = True

    # The burst

    def launch(
        self,
        batch: DecodeBatch,
        steps: int,
        *,
        filtered: bool,
        drafted: bool = False,
        beside: Sequence[Extension] = (),
    ) -> Burst:
        """With `drafted`, rows may be copies of one sequence at different positions. What is `beside` the rows is read by
        the way."""
        if self._table_changed:
            self._steps.table_SP.copy_(upload(torch.from_numpy(self._table.copy()), self._device), non_blocking=True)
            self._table_changed = False
        run = self._decode_of(batch, steps, filtered, drafted, bool(beside))
        if beside:
            assert self._beside is not None
            self._beside.fill(beside)
        run()
        self.num_bursts += 1
        return self.look()

    def _decode_of(
        self, batch: DecodeBatch, steps: int, filtered: bool, drafted: bool = False, beside: bool = False
    ) -> Body:
        """A function that runs the burst. On a CPU always over all slots: a row's rounding must not depend on their number.
        On a GPU over all slots until a graph of fewer rows is worth its capture."""
        if not self._on_gpu:
            return lambda: self._decode(self._batch, steps, filtered, beside=beside)

        def key_of(width: int) -> BurstKey:
            shared = self._shared(batch, width)
            parts = self._parts(batch, width, shared is not None)
            return "decode", width, steps, filtered, parts, shared, drafted, beside

        key = key_of(padded_rows(len(batch.slots), self._state.num_slots))
        if beside or not self._graphs.worth(key):
            key = key_of(self._state.num_slots)
        run = self._burst_of(key)
        width = key[1]
        self._batch[:, :width].copy_(upload(self._rows(batch, width), self._device), non_blocking=True)
        return run

    def _burst_of(self, key: BurstKey) -> Body:
        _, width, steps, filtered, parts, shared, drafted, beside = key
        return self._graphs.of(
            key,
            lambda: self._decode(self._batch[:, :width], steps, filtered, shared, parts, drafted, beside),
            self._blank,
        )

    def _blank(self) -> None:
        """Nothing to decode and nothing to read."""
        self._batch.copy_(self._rows(EMPTY_BATCH, self._state.num_slots))
        if self._beside is not None:
            self._beside.clear()

    def preparations(self, steps: int, prompt: int, longest: int, *, filtered: bool) -> list[Body]:
        """Captures of the bursts that most jobs need: of all slots, also with sequences that are split, and with prompts of
        this length beside and shared, then of ever fewer rows. Each leaves everything as it is. Empty where nothing is
        captured."""
        if not self._graphs.enabled:
            return []
        widths = sorted({padded_rows(rows, self._state.num_slots) for rows in range(1, self._state.num_slots + 1)})
        shapes = [(self._state.num_slots, parts, False) for parts in (0, *parts_up_to(longest))]
        shapes += [(self._state.num_slots, 0, True)] if self._beside else []
        shapes += [(width, 0, False) for width in reversed(widths[:-1])]
        keys = [
            (
                "decode",
                width,
                steps,
                filtered,
                self._parts(DecodeBatch([], [], [], [], parts), width, False),
                self._shared(self._full_batch(prompt), width) if beside else None,
                False,
                beside,
            )
            for width, parts, beside in shapes
        ]
        return [partial(self._burst_of, key) for key in dict.fromkeys(keys)]

    @property
    def _group(self) -> int:
        """Query heads for a key-value head."""
        return self._steps.model.shape.num_heads // self._steps.model.shape.num_kv_heads

    def _full_batch(self, prompt: int) -> DecodeBatch:
        """All slots, in readings of full size, whose prompts have this length."""
        slots, members = self._state.num_slots, members_of_reading(self._group)
        firsts = list(range(0, slots, members))
        counts = [min(members, slots - first) for first in firsts]
        shared = (prompt - 1) // self._steps.cache.page_tokens * self._steps.cache.page_tokens
        return DecodeBatch(list(range(slots)), firsts, counts, [shared] * slots)

    def _shared(self, batch: DecodeBatch, width: int) -> SharedCut | None:
        """How shared pages are read once for all their rows; None where that saves less than its extra kernel costs. As if
        all rows were in readings of full size, whatever runs just now: every other way would be a graph of its own."""
        cache = self._steps.cache
        if batch.saved_tokens * cache.token_bytes < _SHARING_BYTES:
            return None
        readings = -(-width // members_of_reading(self._group))
        return shared_cut(readings * cache.num_kv_heads, batch.longest_shared)

    def _parts(self, batch: DecodeBatch, width: int, shared: bool) -> int:
        """Parts of long sequences; 0 wherever attention does not split by length, so that equal work shares one graph."""
        alike = shared or not enough_programs(width * self._steps.cache.num_kv_heads)
        return 0 if alike else batch.parts

    def _rows(self, batch: DecodeBatch, width: int) -> Tensor:
        """Slots, firsts, counts and skips of the batch. Rows without a sequence point to the spare slot."""
        rows = np.zeros((4, width), dtype=np.int64)
        rows[0] = self._state.nobody
        for row, values in zip(rows, (batch.slots, batch.firsts, batch.counts, batch.skips), strict=True):
            row[: len(values)] = values
        return torch.from_numpy(rows)

    def _decode(
        self,
        batch_4B: Tensor,
        steps: int,
        filtered: bool,
        shared: SharedCut | None = None,
        parts: int = 0,
        drafted: bool = False,
        beside: bool = False,
    ) -> None:
        slots_B, firsts_B, counts_B, skips_B = batch_4B
        readings = None if shared is None else Readings(firsts_B, counts_B, skips_B, shared)
        for step in range(steps):
            prompts = self._beside.of(step) if beside and self._beside else None
            self._steps.decode(
                slots_B, filtered=filtered, readings=readings, parts=parts, drafted=drafted, beside=prompts
            )

    def look(self) -> Burst:
        """The state of all slots after what was launched last."""
        number = self.num_bursts - 1
        active, counts = (self._to_host(column) for column in (self._state.active, self._state.counts))
        if not self._on_gpu:
            return Burst(number, active, counts, None)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Burst(number, active, counts, done)

    def _to_host(self, column: Tensor) -> Tensor:
        """A copy on the host, complete once the stream has reached it."""
        if not self._on_gpu:
            return column
        kept = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
        return kept.copy_(column, non_blocking=True)

    # Out of the slots

    def read(self, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int] = ()) -> list[Sampled]:
        """What these slots have sampled, from `starts` on. The first `counts` tokens must be there: sampled by bursts that
        have ended."""
        if not slots:
            return []
        state, longest, shortest = self._state, max(counts), min(starts, default=0)
        with torch.cuda.stream(self._side) if self._side else nullcontext():
            rows = upload(torch.tensor(slots), self._device)
            columns = [
                self._to_host(column[rows, shortest:longest]).numpy()
                for column in (state.out_tokens, state.out_logprobs, state.out_versions)
            ]
        if self._side:
            self._side.synchronize()
        firsts = [start - shortest for start in starts] or [0] * len(slots)
        return [
            Sampled(*(column[row, first : count - shortest].tolist() for column in columns))
            for row, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ]

    def read_routes(self, spans: Sequence[CachedSpan]) -> list[bytes]:
        """Rows of experts of cached tokens, of bursts that have ended."""
        pages = self._steps.cache.routes
        assert pages is not None, "no experts are recorded here"
        places = [span.places(pages.page_tokens) for span in spans]
        joined = np.concatenate([np.zeros(0, dtype=np.int64), *places])
        if not len(joined):
            return [b""] * len(spans)
        with torch.cuda.stream(self._side) if self._side else nullcontext():
            rows = self._to_host(pages.read(upload(torch.from_numpy(joined), self._device))).numpy()
        if self._side:
            self._side.synchronize()
        ends = np.cumsum([len(one) for one in places])
        return [rows[end - len(one) : end].tobytes() for one, end in zip(places, ends, strict=True)]


def opening_of(running: Running) -> Opening:
    """A sequence as it enters its slot."""
    sequence = running.sequence
    return opening_at(running, running.slot, len(sequence.sampled.tokens), sequence.read[-1])


def opening_at(running: Running, slot: int, count: int, token: int) -> Opening:
    """The sequence in a slot after `count` sampled tokens, of which `token` is the last."""
    group = running.sequence.group
    return Opening(
        slot=slot,
        ordinal=group.prompt.ordinal if group.options.draws is None else group.options.draws,
        sample=running.sequence.sample,
        token=token,
        position=len(group.tokens) + count - 1,
        count=count,
        sampling=group.prompt.sampling,
    )


_Unread = TypeVar("_Unread", Fill, Extension)


def _batches(unread: Iterable[_Unread]) -> Iterator[tuple[int, list[_Unread]]]:
    """Batches of sequences of about the same length, each with the length they are padded to."""

    def bucket(one: _Unread) -> int:
        return padded_tokens(len(one.tokens))

    for size, members in groupby(sorted(unread, key=bucket), key=bucket):
        rows = list(members)
        for start in range(0, len(rows), PREFILL_ROWS):
            yield size, rows[start : start + PREFILL_ROWS]
