"""A decoder that can be put anywhere in its work, so that a long run is measured by a few windows of it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.sequences import Admission, Sequence


class JumpingDecoder(ContinuousDecoder):
    """Its sequences can begin without their prompts being read, and jump to any length of answer. The tokens that were never
    computed are then whatever the cache holds: enough to measure how long a step takes, not to sample anything."""

    _pretends = False

    def _read(self, admission: Admission) -> None:
        if not self._pretends:
            super()._read(admission)

    @torch.inference_mode()
    def begin(self, count_of: Callable[[Sequence], int]) -> None:
        """Fill the slots with what waits, without reading prompts; each answer already has `count_of` tokens."""
        self._pretends = True
        limit, self._schedule.prefill_tokens = self._schedule.prefill_tokens, sys.maxsize
        self._admit()
        self._schedule.prefill_tokens, self._pretends = limit, False
        self.jump(count_of)

    @torch.inference_mode()
    def admit(self) -> None:
        """Read prompts and open slots, without a burst, as long as there is room."""
        before, rows = (-1, -1), self._schedule.beside_rows
        self._schedule.beside_rows = 0  # there is no burst that could read them
        while before != (before := (self._schedule.num_waiting, self._schedule.next_unread)):
            self._admit()
        self._schedule.beside_rows = rows

    @torch.inference_mode()
    def jump(self, count_of: Callable[[Sequence], int]) -> None:
        """Set the length of every answer in a slot."""
        self.settle()
        for running in self._schedule.running.values():
            running.max_count = count_of(running.sequence)
        slots = list(self._schedule.running)
        self._device.jump(slots, [self._schedule.running[slot].max_count for slot in slots])

    def settle(self) -> None:
        """Wait for all bursts, and look at what they have ended."""
        while self._in_flight:
            self._collect()

    def drop_all(self) -> None:
        """Give up every group."""
        for ordinal in self._schedule.ordinals:
            self.drop(ordinal)

    def fill_cache(self) -> None:
        """Random keys and values everywhere: a product of zeros is faster than real work."""
        random_cache(self._device.cache)


def random_cache(cache: PagedCache) -> None:
    values, scales = cache.tensors[:2], cache.tensors[2:]
    for tensor in values:
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 0x60)  # fp8 numbers from 0 to 32
        else:
            tensor.normal_()
    for tensor in scales:
        tensor.fill_(0.05)
