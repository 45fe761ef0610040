"""Publication beside the trainer's next forward and backward pass: by a thread, and on a GPU by a stream of its own.

The weights must not change before they are read: the trainer calls `hold` before its optimizer's next step.
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
    """Where several ranks publish, their `agree` needs a process group that the trainer's own thread does not use."""

    def __init__(self, writer: WeightWriter, device: int = HOST) -> None:
        self._writer, self._device = writer, device
        self._thread = ThreadPoolExecutor(1)
        self._stream = _stream(device)
        self._pending: Future[Publication] | None = None

    def begin(self, version: int, done: Callable[[Publication], None], failed: Callable[[Exception], None]) -> None:
        """Returns at once. The thread calls `done` when the version can be read, or `failed`."""
        self.hold()
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))  # behind the step that made the weights
        self._pending = self._thread.submit(self._publish, version, ready, done, failed)

    def hold(self) -> float:
        """Wait until the weights that are being published may change; returns the seconds that this took. A publication
        that failed raises here too."""
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
        except Exception as error:  # the border of the thread: nobody else would hear of it
            failed(error)
            raise
        done(publication)
        return publication


def _stream(device: int) -> torch.cuda.Stream | None:
    return None if device == HOST else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
