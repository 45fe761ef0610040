"""Host memory that a GPU copies from and to by itself: pinned in place."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from llamarl.errors import ConfigError

_ALIGNED = 64  # bytes
_PIECE_BYTES = 2 << 30


def pin(memory: Tensor, setting: str) -> None:
    """Pins memory in place. Torch's own pinned memory comes in powers of two and may take twice as much. `setting` is named
    where that is refused."""
    if status := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):  # type: ignore[no-untyped-call]
        raise ConfigError(
            f"{setting}: {memory.nbytes / 1e9:.0f} GB of host memory cannot be pinned (CUDA error {status}); "
            "is there so much, and may this process lock it (ulimit -l)?"
        )


def unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


class HostArena:
    """Host memory that is handed out piece by piece and taken back all at once; it grows to what was needed at most."""

    def __init__(self, setting: str, *, pinned: bool, piece_bytes: int = _PIECE_BYTES) -> None:
        self._setting, self._pinned, self._piece_bytes = setting, pinned, piece_bytes
        self._pieces: list[Tensor] = []
        self._piece = self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Uninitialized bytes, until the next `reset`."""
        while self._piece < len(self._pieces):
            piece = self._pieces[self._piece]
            if self._used + num_bytes <= piece.nbytes:
                start, self._used = self._used, self._used + aligned(num_bytes)
                return piece[start : start + num_bytes]
            self._piece, self._used = self._piece + 1, 0
        self._pieces.append(self._make(max(aligned(num_bytes), self._piece_bytes)))
        return self.take(num_bytes)

    def reset(self) -> None:
        self._piece = self._used = 0

    @property
    def num_bytes(self) -> int:
        """All memory that it holds."""
        return sum(piece.nbytes for piece in self._pieces)

    def _make(self, num_bytes: int) -> Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        if self._pinned:
            pin(memory, self._setting)
            weakref.finalize(self, unpin, memory).atexit = False
        return memory
