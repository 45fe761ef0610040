"""Publication during the trainer's next forward and backward pass: by a thread and, on a GPU, on a separate stream.

The weights must not change before they are published: the trainer calls `hold` before its optimizer's next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch

from llamarl.weights.memory import HOST
from llamarl.weights.transport import Publication, WeightWriter


class OverlappedWriter:
    """Publishes in a thread. With several ranks, `agree` needs a process group that the main thread does not use."""

    def __init__(self, writer: WeightWriter, device: int = HOST) -> None:
        self._writer, self._device = writer, device
        self._thread = ThreadPoolExecutor(1)
        self._stream = _stream(device)
        self._pending: Future[Publication] | None = None

    def begin(self, version: int, done: Callable[[Publication], None], failed: Callable[[Exception], None]) -> None:
        """Starts a publication and returns at once. The thread calls `done` when the version can be read, or `failed`."""
        self.hold()
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))  # after the step that made the weights
        self._pending = self._thread.submit(self._publish, version, ready, done, failed)

    def hold(self) -> float:
        """Waits until the weights that are being published may change; returns the seconds that this took. Raises the error
        of a publication that failed."""
        if self._pending is None:
            return 0.0
        start_s = time.monotonic()
        pending, self._pending = self._pending, None
        pending.result()
        return time.monotonic() - start_s

    def _publish(
        self,
        version: int,
        ready: torch.cuda.Event | None,
        done: Callable[[Publication], None],
        failed: Callable[[Exception], None],
    ) -> Publication:
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                if ready is not None and self._stream is not None:
                    self._stream.wait_event(ready)
                publication = self._writer.publish(version)
        except Exception as error:  # the end of the thread: no caller would see the error
            failed(error)
            raise
        done(publication)
        return publication


def _stream(device: int) -> torch.cuda.Stream | None:
    return None if device == HOST else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
