"""The length of every answer of the simulated job: drawn by seed and ordinal, whatever happens to the group."""

from __future__ import annotations

from random import Random

import numpy as np
from msgspec.structs import replace

from llamarl.plan.gpus import Gpu
from llamarl.plan.lengths import Lengths
from llamarl.plan.trainer import UpdateLoad, in_trees, packed, shared_prompts

_BLOCK = 256  # number of groups that are drawn together
_KEPT = 64  # number of blocks that are kept


class Answers:
    def __init__(
        self,
        lengths: Lengths,
        *,
        samples: int,
        prompt: int,
        seed: int,
        flat: float = 0.0,
        skip_flat: bool = True,
        share_prompts: bool = False,
        windows: tuple[int, ...] = (),
    ) -> None:
        """`flat`: the share of groups whose rewards are all equal; `skip_flat`: nothing is trained on them. `share_prompts`:
        whether the trainer computes a prompt once for all its answers, where that pays. `windows`: of the model's layers."""
        self._lengths, self._samples, self._prompt, self._seed = lengths, samples, prompt, seed
        self._flat, self._skip_flat, self._share_prompts = flat, skip_flat, share_prompts
        self._windows = windows
        self._blocks: dict[int, list[list[int]]] = {}

    def of(self, ordinal: int) -> list[int]:
        """Number of tokens of each answer of the group."""
        block, at = divmod(ordinal, _BLOCK)
        if block not in self._blocks:
            if len(self._blocks) >= _KEPT:
                self._blocks.pop(next(iter(self._blocks)))
            random = np.random.default_rng([self._seed, block % (1 << 63)])
            self._blocks[block] = self._lengths.draw(random, _BLOCK * self._samples).reshape(_BLOCK, -1).tolist()
        return self._blocks[block][at]

    def tokens(self, ordinal: int) -> int:
        return sum(self.of(ordinal))

    def batch(self, gpu: Gpu, ordinals: tuple[int, ...]) -> UpdateLoad:
        """The load of an update on these groups; skipped ones excluded."""
        kept = [ordinal for ordinal in ordinals if not (self._skip_flat and self.is_flat(ordinal))]
        answers = [length for ordinal in kept for length in self.of(ordinal)]
        documents = [self._prompt + length for length in answers]
        load = packed(gpu, documents, sum(answers) / max(1, sum(documents)), self._windows)
        if not self._share_prompts:
            return load
        shared = shared_prompts(gpu, len(kept), self._prompt, self._samples, self._windows)
        return replace(
            load, shared=shared, in_trees=in_trees(gpu, self._prompt, [self.of(ordinal) for ordinal in kept])
        )

    def is_flat(self, ordinal: int) -> bool:
        """Whether all rewards of the group are equal."""
        return self._flat > 0 and Random(self._seed * 1_000_003 + ordinal).random() < self._flat
