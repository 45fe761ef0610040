"""Which code runs: that of a GPU on a GPU, and in a rehearsal too, whose fake tensors have no device of their own.

`rehearse/` builds ranks of large worlds without memory. Fake tensors can only say "cpu" where torch knows no GPU, so the few
places where a trainer's code differs between devices ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Backend = str | Callable[..., Any]


class _Rehearsal:
    backend: Backend | None = None  # how it compiles; None: this is no rehearsal


def on_gpu(where: Tensor | torch.device) -> bool:
    """Whether the code of a GPU runs for this tensor, or on this device."""
    is_cuda = where.is_cuda if isinstance(where, Tensor) else where.type == "cuda"
    return is_cuda or _Rehearsal.backend is not None


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made in the order of its work. The host does not wait, as it would for memory that is not
    pinned: then the device would have nothing queued when the wait ends."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def compile_backend() -> Backend:
    """The backend of `torch.compile`."""
    return _Rehearsal.backend or "inductor"


@contextmanager
def rehearsing(backend: Backend) -> Iterator[None]:
    """Runs the code of a GPU, compiled by `backend`, whatever the device."""
    before, _Rehearsal.backend = _Rehearsal.backend, backend
    try:
        yield
    finally:
        _Rehearsal.backend = before
