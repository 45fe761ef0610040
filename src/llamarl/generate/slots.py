"""The state of every slot on the device: what a decode step reads and writes without the host.

There is one row more than slots. Rows of a batch without a sequence point to it, and it stays inactive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import astuple
from torch import Tensor

from llamarl.generate.sampling import SAMPLING_DTYPES, SamplingColumns
from llamarl.model.gpu_paths import upload
from llamarl.types import Sampling


@dataclass(frozen=True)
class Opening:
    """A sequence that enters a slot: where it stands, and how it is sampled."""

    slot: int
    ordinal: int
    sample: int
    token: int  # next token to read; all before it are in the cache
    position: int  # of that token
    count: int  # tokens sampled so far
    sampling: Sampling


class SlotState:
    """One column for each fact about a slot; `sampling` has a column for each field of `Sampling`, by name."""

    def __init__(self, slots: int, max_new_tokens: int, eos_ids: Sequence[int], device: torch.device) -> None:
        self.num_slots, self.nobody, self.device = slots, slots, device
        rows = slots + 1

        def column(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        self.active, self.version = column(torch.bool), torch.zeros((), dtype=torch.int32, device=device)
        self.tokens, self.positions = column(), column()
        self.ordinals, self.samples, self.counts = column(), column(), column()
        self.sampling = {name: column(dtype) for name, dtype in SAMPLING_DTYPES.items()}
        self.eos = torch.tensor(list(eos_ids), dtype=torch.int64, device=device)
        self.out_tokens = torch.zeros(rows, max_new_tokens, dtype=torch.int32, device=device)
        self.out_versions = torch.zeros_like(self.out_tokens)
        self.out_logprobs = torch.zeros(rows, max_new_tokens, dtype=torch.float32, device=device)

    def open(self, openings: Sequence[Opening]) -> None:
        if not openings:
            return
        whole = torch.tensor([[o.slot, o.token, o.position, o.ordinal, o.sample, o.count] for o in openings])
        real = torch.tensor([astuple(o.sampling) for o in openings], dtype=torch.float64)  # exact for whole numbers too
        whole, real = upload(whole, self.device), upload(real, self.device)
        rows = whole[:, 0]
        columns = (self.tokens, self.positions, self.ordinals, self.samples, self.counts)
        for index, column in enumerate(columns, start=1):
            column[rows] = whole[:, index]
        for index, column in enumerate(self.sampling.values()):
            column[rows] = real[:, index].to(column.dtype)
        self.active.index_fill_(0, rows, True)  # `active[rows] = True` would wait for the device

    def close(self, slot: int) -> None:
        """Stop a slot from outside; slots whose sequence ended are inactive already."""
        self.active[slot] = False

    def jump(self, slots_B: Tensor, counts_B: Tensor) -> None:
        """Set the number of sampled tokens, and with it the position."""
        self.positions[slots_B] += counts_B - self.counts[slots_B]
        self.counts[slots_B] = counts_B

    def close_all(self, slots: Sequence[int]) -> None:
        """Stop slots without waiting for the device."""
        if slots:
            self.active.index_fill_(0, upload(torch.tensor(slots), self.device), False)

    def put_back(self, slot: int, tokens: Tensor, logprobs: Tensor, versions: Tensor, start: int = 0) -> None:
        """Set what a sequence has sampled from `start` on, such as before it was paused."""
        for kept, column in ((tokens, self.out_tokens), (logprobs, self.out_logprobs), (versions, self.out_versions)):
            column[slot, start : start + len(kept)] = kept.to(self.device)

    def sampling_of(self, slots_B: Tensor) -> SamplingColumns:
        """How these slots are sampled, one row for each."""
        return {name: column[slots_B] for name, column in self.sampling.items()}

    def advance(self, slots_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor) -> None:
        """Append one token to every active slot; stop those whose sequence it ends."""
        slots_B = torch.where(self.active[slots_B], slots_B, self.nobody)
        at_B = self.counts[slots_B].clamp(max=self.out_tokens.shape[1] - 1)
        self.out_tokens[slots_B, at_B] = tokens_B.to(torch.int32)
        self.out_logprobs[slots_B, at_B] = logprobs_B
        self.out_versions[slots_B, at_B] = self.version
        count_B = self.counts[slots_B] + 1
        ended_B = torch.isin(tokens_B, self.eos) | (count_B >= self.sampling["max_new_tokens"][slots_B])
        self.counts[slots_B] = count_B
        self.positions[slots_B] += 1
        self.tokens[slots_B] = tokens_B
        self.active[slots_B] = ~ended_B
        self._empty_nobody()

    def _empty_nobody(self) -> None:
        self.active[self.nobody] = False
        self.counts[self.nobody] = 0
        self.positions[self.nobody] = 0
