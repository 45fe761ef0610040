"""Prompts that are read beside running answers: every step of a burst computes some of their tokens too.

The products of a step with few rows wait for memory, since all weights are read for a few tokens, and more rows cost little
there: a prompt that is read by the way takes a fraction of the time of a pass of its own, during which all answers wait.

The tokens of a step follow one another in one sequence. What comes before them is in its pages, which are read once for many
of them (`prompt_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llamarl.generate.attention import DecodeAttention
from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.pages import NO_PAGE
from llamarl.generate.sequences import Extension
from llamarl.model.gpu_paths import upload
from llamarl.model.ops import Rope
from llamarl.model.transformer import Attend
from llamarl.model_spec import PLAIN_ATTENTION, AttentionOptions


class PromptRows(NamedTuple):
    """Tokens that one step reads, their positions, and a row with the pages of their sequence for each."""

    tokens_M: Tensor
    positions_M: Tensor
    table_MP: Tensor
    rows_M: Tensor


class PromptAttention:
    """Attention of a step's prompt tokens: all keys and values are written to their pages, then each token attends to those
    up to its own."""

    rotates = True

    def __init__(self, cache: PagedCache, rows: PromptRows, rope: Rope) -> None:
        """`rope`: tables of all positions, [T, 1, D]."""
        self._cache, self._rows, self._rope = cache, rows, rope
        self._plain: Attend = DecodeAttention(cache, rows.table_MP, rows.rows_M, rows.positions_M, rope)

    def __call__(
        self,
        layer: int,
        q_M1HD: Tensor,
        k_M1KD: Tensor,
        v_M1KD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        if not q_M1HD.is_cuda:
            return self._plain(layer, q_M1HD, k_M1KD, v_M1KD, options)
        from llamarl.generate.prompt_kernels import attend_prompt

        keys, values, rows = self._cache.keys(layer), self._cache.values(layer), self._rows
        where = rows.table_MP, rows.rows_M, rows.positions_M, self._rope[options.rope : options.rope + 2]
        return attend_prompt((q_M1HD, k_M1KD, v_M1KD), keys, values, *where, options=options)


class BesideAttention:
    """Attention of a step's answers, whose rows come first, and of the prompt tokens beside them: on a GPU at the same time,
    since one waits for memory and the other for tensor cores."""

    rotates = True

    def __init__(
        self, num_answers: int, answers: DecodeAttention, prompt: PromptAttention, side: torch.cuda.Stream | None
    ) -> None:
        self._num_answers, self._answers, self._prompt, self._side = num_answers, answers, prompt, side

    def __call__(
        self,
        layer: int,
        q_B1HD: Tensor,
        k_B1KD: Tensor,
        v_B1KD: Tensor,
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> Tensor:
        count = self._num_answers
        with _alongside(self._side):
            prompt = self._prompt(layer, q_B1HD[count:], k_B1KD[count:], v_B1KD[count:], options)
        answers = self._answers(layer, q_B1HD[:count], k_B1KD[:count], v_B1KD[:count], options)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        return torch.cat([answers, prompt])


@contextmanager
def _alongside(side: torch.cuda.Stream | None) -> Iterator[None]:
    """What is launched here goes to the side stream, behind all that was launched before; without one, it stays in line."""
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # of None: changes nothing
        yield


class BesideInputs:
    """The tokens that a burst reads, where its graph expects them. A step without any writes to the page of nobody."""

    def __init__(self, steps: int, rows: int, pages: int, device: torch.device) -> None:
        self.rows, self._device = rows, device
        # For each step: the position of its first token, its tokens, the pages of its sequence.
        self._steps = torch.zeros(steps, 1 + rows + pages, dtype=torch.int64, device=device)
        self._rows_M = torch.arange(rows, device=device)

    def fill(self, extensions: Sequence[Extension]) -> None:
        """Take what the next burst reads: `rows` tokens in every step. The last step of a sequence reads its last ones,
        some of them again where fewer are left."""
        inputs = np.full(self._steps.shape, NO_PAGE, dtype=np.int64)
        step = 0
        for one in extensions:
            end = one.start + len(one.tokens)
            for start in range(one.start, end, self.rows):
                first = min(start, end - self.rows)
                inputs[step, 0] = first
                inputs[step, 1 : 1 + self.rows] = one.tokens[first - one.start : first - one.start + self.rows]
                inputs[step, 1 + self.rows : 1 + self.rows + len(one.pages)] = one.pages
                step += 1
        self._steps.copy_(upload(torch.from_numpy(inputs), self._device), non_blocking=True)

    def clear(self) -> None:
        self._steps.zero_()

    def of(self, step: int) -> PromptRows:
        here = self._steps[step]
        first, tokens_M, table_P = here[:1], here[1 : 1 + self.rows], here[1 + self.rows :]
        table_MP = table_P.to(torch.int32).expand(self.rows, -1)
        return PromptRows(tokens_M, first + self._rows_M, table_MP, self._rows_M)
