"""Times of one generator replica: a decode step, the prefill, a batch that drains, and the steady state."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from llamarl.config.lora import NO_LORA, LoraConfig
from llamarl.model_spec import ModelSpec
from llamarl.plan.gpus import Gpu
from llamarl.plan.lengths import Lengths
from llamarl.plan.terms import (
    CPU_PREFILL_ROWS,
    WORKSPACE_BYTES,
    decode_exchange_s,
    decode_terms,
    held_bytes,
    kv_bytes_per_token,
    passing_bytes,
    prefill_s,
    total_s,
)
from llamarl.shape_buckets import padded_rows, padded_tokens

# Mean factor by which `padded_rows` rounds up: (1 / 2 + 1 / 3) / ln 2. Small counts are rounded up more, at no cost.
_ROUNDED_UP = 1.2
GPU_BURST = 8  # decode steps between two checks of the results, which are read one burst late (generate/decoder.py)


def cached_on_cpu(slots: int, length: int, page_tokens: int = 16) -> int:
    """Tokens of cache that a CPU reads per step: all pages of all slots, full or empty (generate/kv_cache.py)."""
    return slots * -(-length // page_tokens) * page_tokens


class Replica(Struct, frozen=True, dict=True):
    """One generating copy of the policy, with `tp` ranks and `slots` answers at once."""

    shape: ModelSpec
    gpu: Gpu
    precision: str
    tp: int
    slots: int
    prompt: int
    length: int  # capacity of a slot in tokens, prompt and answer
    lora: LoraConfig = NO_LORA
    merged: bool = False  # whether adapters are merged into a copy of the weights
    expert: int = 1  # parts of the ranks that hold different experts

    @property
    def layout(self) -> str:
        """Its ranks in words."""
        return f"TP {self.tp} (EP {self.expert})" if self.expert > 1 else f"TP {self.tp}"

    def cached_tokens(self, samples: int, answers: Lengths) -> float:
        """Tokens in the cache on average, with all slots busy: answers of all ages, and a prompt for each group."""
        return self.slots * (self.prompt / samples + answers.mean_under_way)

    def memory_kinds(self, cached_tokens: float) -> dict[str, float]:
        """Bytes of one rank's tensors, by kind."""
        return {
            "weights": held_bytes(self.shape, self.precision, self.lora, merged=self.merged) / self.tp,
            "KV cache": cached_tokens * kv_bytes_per_token(self.shape, self.precision, self.tp),
            "activations": passing_bytes(self.shape, self.tp, self.slots, self.prompt, self.expert),
        }

    def memory_bytes(self, cached_tokens: float) -> float:
        """Memory of one rank."""
        return sum(self.memory_kinds(cached_tokens).values()) + WORKSPACE_BYTES

    def rows(self, active: float) -> int:
        """Number of rows that a step computes: padded on a GPU, all slots on a CPU."""
        return self.slots if self.gpu.is_cpu else padded_rows(int(active), self.slots)

    @cached_property
    def cached_token_s(self) -> float:
        """Time that each cached token adds to a step."""
        if self.gpu.is_cpu:
            return 0.0
        return self.gpu.decode.cache * kv_bytes_per_token(self.shape, self.precision, self.tp) / self.gpu.bytes_per_s

    def read_share(self, length: float) -> float:
        """Share of a sequence's cached tokens that a step reads, over all layers; less than 1 beyond their windows."""
        windows = self.shape.windows
        if not windows or length <= min((w for w in windows if w), default=length):
            return 1.0
        return sum(min(1.0, w / length) if w else 1.0 for w in windows) / len(windows)

    def step_s(self, active: float, cached_tokens: float) -> float:
        """Time of a decode step with `active` answers and `cached_tokens` tokens in the cache, which are read as if all
        sequences were equally long."""
        count = int(active)
        if count not in self._known_steps_s:
            rows = self.rows(active)
            if rows not in self._known_rows_s:
                self._known_rows_s[rows] = self._row_step_s(rows)
            self._known_steps_s[count] = self._known_rows_s[rows]
        read = cached_tokens * self.read_share(cached_tokens / active) if self.shape.windows else cached_tokens
        return self._known_steps_s[count] + self.cached_token_s * read

    def growth_s(self, active: int, cached_tokens: float) -> float:
        """Time by which a step is longer than the one before it, while all answers grow."""
        windows, each = self.shape.windows, cached_tokens / max(1, active)
        share = sum(not w or each < w for w in windows) / len(windows) if windows else 1.0
        return active * share * self.cached_token_s

    def typical_step_s(self, active: NDArray[np.float64], cached_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """`step_s` for arrays, interpolated so that it has no jumps."""
        rows, seconds = self._steps_by_rows
        read = cached_tokens
        if self.shape.windows:
            shares = [self.read_share(length) for length in (cached_tokens / active).tolist()]
            read = cached_tokens * np.array(shares)
        found: NDArray[np.float64] = np.interp(active * _ROUNDED_UP, rows, seconds) + self.cached_token_s * read
        return found

    @cached_property
    def _steps_by_rows(self) -> tuple[list[int], list[float]]:
        rows = sorted({*(1 << power for power in range(self.slots.bit_length())), self.slots})
        return rows, [self.step_s(count, 0) for count in rows]

    @cached_property
    def _known_steps_s(self) -> dict[int, float]:
        return {}

    @cached_property
    def _known_rows_s(self) -> dict[int, float]:
        return {}

    def _row_step_s(self, rows: int) -> float:
        """Time of a step without the part that depends on the cache."""
        cached = cached_on_cpu(self.slots, self.length) if self.gpu.is_cpu else 0
        lora = NO_LORA if self.merged else self.lora
        terms = decode_terms(self.shape, self.gpu, self.precision, rows, cached, self.tp, lora, self.expert)
        return total_s(self.gpu.decode, terms) + decode_exchange_s(self.shape, self.gpu, rows, self.tp)

    def prefill_s(self, groups: int) -> float:
        """Time to read the prompts of `groups` groups that arrive together."""
        if groups not in self._prefills_s:
            self._prefills_s[groups] = self._prefill_s(groups)
        return self._prefills_s[groups]

    @cached_property
    def _prefills_s(self) -> dict[int, float]:
        return {}

    def _prefill_s(self, groups: int) -> float:
        bucket = padded_tokens(self.prompt - 1)
        if self.gpu.is_cpu:
            calls = -(-groups // CPU_PREFILL_ROWS)
            return calls * prefill_s(
                self.shape, self.gpu, self.precision, CPU_PREFILL_ROWS, bucket, self.tp, self.expert
            )
        return prefill_s(self.shape, self.gpu, self.precision, groups, bucket, self.tp, self.expert)

    @property
    def late_steps(self) -> float:
        """Steps that an answer takes beyond its number of tokens, on average. On a GPU: the rest of its burst, and the burst
        that runs while the host reads the results. On a CPU: the step that is running when it arrives."""
        return 1.0 if self.gpu.is_cpu else 1.5 * GPU_BURST

    # Whole batches

    def steady_step_s(self, active: float, answers: Lengths) -> float:
        """Time of a step in the steady state, with answers of all ages in the cache."""
        return self.step_s(active, active * (self.prompt + answers.mean_under_way))

    def drain_s(self, count: float, total: float, samples: int, answers: Lengths) -> float:
        """Time for `count` answers that start together, until the last of `total` (over all replicas) has ended. Answers
        beyond the number of slots start as slots become free."""
        slots = min(self.slots, count)
        waiting_s = (count - slots) / slots * (answers.mean + self.late_steps) * self.steady_step_s(slots, answers)
        return self.prefill_s(max(1, round(count / samples))) + waiting_s + self._ending_s(slots, total, answers)

    def _ending_s(self, count: float, total: float, answers: Lengths) -> float:
        """Time until the last of the running answers ends; steps become shorter as the batch shrinks."""
        last, at, spent_s = answers.longest_of(total), 0.0, 0.0
        for share, length in zip(answers.edges[:-1].tolist(), answers.values.tolist(), strict=True):
            active, end = max(1.0, count * (1 - share)), min(length, last)
            if end > at:
                spent_s += (end - at) * self.step_s(active, active * (self.prompt + (at + end) / 2))
                at = end
        return spent_s + (last - at) * self.step_s(1, self.prompt + last) + self.late_steps * self.step_s(1, 0)
