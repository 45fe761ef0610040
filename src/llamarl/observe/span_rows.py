"""spans.jsonl: the spans of every executor while the job runs, one row per update.

`timeline.json` is written once, at the end. These rows are there for a live run, and for one that was killed.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.io.append_file import AppendFile
from llamarl.observe.timeline import Span

_MB = 1 << 20
_MAX_PENDING = 20_000  # spans that wait for their update, at most; a row is written earlier then


class SpanRows:
    """Writes spans.jsonl. Times are seconds since `start_s`; `start` is the number of this start of the job. Once the file
    has `max_mb`, a last row says so, and further spans are left out."""

    def __init__(self, file: AppendFile, start: int, start_s: float, max_mb: int) -> None:
        self._file, self._start, self._start_s, self._max_bytes = file, start, start_s, max_mb * _MB
        self._pending: dict[str, list[tuple[str, str, float, float]]] = {}
        self._num_pending = 0
        self._full = file.num_bytes >= self._max_bytes

    def add(self, executor: str, spans: Sequence[Span]) -> None:
        if self._full or not spans:
            return
        start_s = self._start_s
        self._pending.setdefault(executor, []).extend(
            (span.kind, span.name, round(span.start_s - start_s, 5), round(span.end_s - start_s, 5)) for span in spans
        )
        self._num_pending += len(spans)
        if self._num_pending >= _MAX_PENDING:
            self.flush()

    def flush(self) -> None:
        """Write the spans since the last row as one row."""
        if self._pending:
            self._file.append_json({"start": self._start, "spans": self._pending})
            self._pending, self._num_pending = {}, 0
            if self._file.num_bytes >= self._max_bytes:
                self._full = True
                self._file.append_json({"start": self._start, "full": True})
