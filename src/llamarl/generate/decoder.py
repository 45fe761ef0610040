"""Continuous decoding: a fixed number of slots, refilled as soon as a completion ends.

Each step decodes one token in every slot. Weights may change between any two steps; the versions that sampled a
completion are kept token by token. All shapes are fixed, so what a slot produces never depends on its neighbours.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from llamarl.generate.cache import KVCache
from llamarl.generate.sampling import uniform_draws
from llamarl.generate.step import PREFILL_ROWS, bucket_of, decode_step, prefill
from llamarl.model.transformer import Transformer
from llamarl.types import (
    Completion,
    CompletionGroup,
    PromptGroup,
    VersionRun,
    bytes_to_tokens,
)


@dataclass
class _Underway:
    """A group some of whose completions are still being decoded."""

    prompt: PromptGroup
    completions: dict[int, Completion] = field(default_factory=dict)


class ContinuousDecoder:
    def __init__(
        self,
        model: Transformer,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        eos_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        self.model, self.version = model, -1
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        weight = model.lm_head.weight
        self._device, self._seed = weight.device, seed
        length = max(max_prompt_tokens + max_new_tokens, bucket_of(max_prompt_tokens))
        self._cache = KVCache(model.shape, slots, length, dtype=weight.dtype, device=self._device)
        self._eos = torch.tensor(eos_ids, dtype=torch.int64, device=self._device)
        self._queue: deque[PromptGroup] = deque()
        self._underway: dict[int, _Underway] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._owner: list[tuple[int, int]] = [(0, 0)] * slots  # slot -> (ordinal, sample)
        self._active = self._ints(slots, dtype=torch.bool)
        self._tokens, self._positions = self._ints(slots), self._ints(slots)
        self._ordinals, self._samples, self._counts = self._ints(slots), self._ints(slots), self._ints(slots)
        self._limits = self._ints(slots)
        self._temperatures = self._ints(slots, dtype=torch.float32)
        self._out_tokens = self._ints(slots, max_new_tokens, dtype=torch.int32)
        self._out_versions = self._ints(slots, max_new_tokens, dtype=torch.int32)
        self._out_logprobs = self._ints(slots, max_new_tokens, dtype=torch.float32)

    def _ints(self, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=self._device)

    @property
    def idle(self) -> bool:
        return not self._underway and not self._queue

    def add(self, group: PromptGroup) -> None:
        """Queue a group; its completions start as slots become free. Raises ValueError for what can never be decoded."""
        num_prompt, sampling = len(group.prompt_tokens) // 4, group.sampling
        if num_prompt == 0:
            raise ValueError("the prompt is empty")
        if num_prompt > self.max_prompt_tokens:
            raise ValueError(
                f"the prompt has {num_prompt} tokens; generator.max_prompt_tokens={self.max_prompt_tokens}"
            )
        if not 1 <= sampling.max_new_tokens <= self.max_new_tokens or not 1 <= sampling.samples <= len(self._owner):
            raise ValueError(f"{sampling} does not fit {len(self._owner)} slots of {self.max_new_tokens} new tokens")
        self._queue.append(group)

    @torch.inference_mode()
    def step(self) -> list[CompletionGroup]:
        """Refill free slots, decode one token everywhere, return the groups whose last completion has ended."""
        self._refill()
        if not self._underway:
            return []
        draws_B = uniform_draws(self._seed, self._ordinals, self._samples, self._counts)
        tokens_B, logprobs_B = decode_step(
            self.model, self._cache, self._tokens, self._positions, draws_B, self._temperatures
        )
        return self._collect(self._append(tokens_B, logprobs_B))

    def _append(self, tokens_B: Tensor, logprobs_B: Tensor) -> list[int]:
        """Store the new tokens; returns the slots that are finished by them."""
        rows = self._active.nonzero()[:, 0]
        at = self._counts[rows]
        self._out_tokens[rows, at] = tokens_B[rows].to(torch.int32)
        self._out_logprobs[rows, at] = logprobs_B[rows]
        self._out_versions[rows, at] = self.version
        self._counts[rows] += 1
        self._positions[rows] += 1
        self._tokens[rows] = tokens_B[rows]
        ended = torch.isin(tokens_B, self._eos) | (self._counts >= self._limits)
        finished: list[int] = (ended & self._active).nonzero()[:, 0].tolist()
        return finished

    def _collect(self, finished: list[int]) -> list[CompletionGroup]:
        done = []
        for slot in finished:
            ordinal, sample = self._owner[slot]
            group = self._underway[ordinal]
            group.completions[sample] = self._completion(slot)
            self._active[slot] = False
            self._positions[slot] = 0
            self._free.append(slot)
            if len(group.completions) == group.prompt.sampling.samples:
                ordered = tuple(group.completions[index] for index in sorted(group.completions))
                done.append(CompletionGroup(group.prompt, ordered))
                del self._underway[ordinal]
        return done

    def _completion(self, slot: int) -> Completion:
        count = int(self._counts[slot])
        tokens = self._out_tokens[slot, :count].cpu().numpy()
        versions = self._out_versions[slot, :count].tolist()
        return Completion(
            tokens=tokens.astype("<i4").tobytes(),
            behavior_logprobs=self._out_logprobs[slot, :count].cpu().numpy().astype("<f4").tobytes(),
            versions=tuple(VersionRun(version, len(list(run))) for version, run in groupby(versions)),
            truncated=int(tokens[-1]) not in self._eos.tolist(),
        )

    def _refill(self) -> None:
        """Give free slots to whole groups, oldest first, and compute their prompts, same-sized ones together."""
        admitted: dict[int, list[tuple[PromptGroup, list[int]]]] = {}
        while self._queue and self._queue[0].sampling.samples <= len(self._free):
            group = self._queue.popleft()
            slots = [self._free.pop() for _ in range(group.sampling.samples)]
            self._open(group, slots)
            bucket = bucket_of(len(group.prompt_tokens) // 4 - 1)
            admitted.setdefault(bucket, []).append((group, slots))
        for groups in admitted.values():
            for start in range(0, len(groups), PREFILL_ROWS):
                rows = groups[start : start + PREFILL_ROWS]
                prompts = [bytes_to_tokens(group.prompt_tokens).tolist() for group, _ in rows]
                prefill(self.model, self._cache, prompts, [slots for _, slots in rows])

    def _open(self, group: PromptGroup, slots: list[int]) -> None:
        prompt, sampling = bytes_to_tokens(group.prompt_tokens), group.sampling
        self._underway[group.ordinal] = _Underway(group)
        for sample, slot in enumerate(slots):
            self._owner[slot] = (group.ordinal, sample)
        rows = torch.tensor(slots, device=self._device)
        self._active[rows] = True
        self._tokens[rows] = int(prompt[-1])  # the first decode step reads the prompt's last token
        self._positions[rows] = len(prompt) - 1
        self._ordinals[rows] = group.ordinal
        self._samples[rows] = torch.arange(len(slots), device=self._device)
        self._counts[rows] = 0
        self._limits[rows] = sampling.max_new_tokens
        self._temperatures[rows] = sampling.temperature
