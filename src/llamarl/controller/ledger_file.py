"""The ledger on disk, as its one writer sees it: records are appended, and those that snapshots cover are folded."""

from __future__ import annotations

from pathlib import Path

from llamarl.controller.ledger import Record, encode_record, read_ledger
from llamarl.controller.ledger_state import LedgerState
from llamarl.failpoints import failpoint
from llamarl.io.record_log import SegmentWriter, segment_files

FOLD_BYTES = 16 << 20  # about 45,000 groups: a run with fewer keeps every record


class LedgerFile:
    def __init__(self, folder: Path, fold_bytes: int | None = None) -> None:
        self._folder, self._writer = folder, SegmentWriter(folder)
        self._fold_bytes = FOLD_BYTES if fold_bytes is None else fold_bytes
        self._unfolded_bytes = sum(path.stat().st_size for path in segment_files(folder))

    def append(self, record: Record) -> None:
        """Safe after the next `sync`."""
        data = encode_record(record)
        self._writer.append(data)
        self._unfolded_bytes += len(data)

    def sync(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()

    def fold(self, version: int) -> None:
        """Put totals in the place of all records, once there are many. No job may ever go back behind `version`.

        A crash in between is harmless: until the old segments are gone, the totals repeat what they hold."""
        if self._unfolded_bytes < self._fold_bytes:
            return
        self._writer.sync()
        ledger_state = LedgerState.of(read_ledger(self._folder))
        ledger_state.fold(version)
        old = segment_files(self._folder)
        data = encode_record(ledger_state.checkpoint())
        failpoint("ledger.fold")
        self._writer.begin_segment()
        self._writer.append(data)
        self._writer.sync()
        failpoint("ledger.folded")
        for path in old:
            self._writer.remove(int(path.name))
        self._unfolded_bytes = 0
        self._fold_bytes = max(
            self._fold_bytes, len(data)
        )  # where snapshots keep much unfolded, folding pays less often
