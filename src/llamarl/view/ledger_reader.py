"""Follows a run's ledger: the audit, and the life of every group that the ledger still lists one by one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from llamarl.controller import ledger
from llamarl.controller.ledger import LedgerTotals, Record
from llamarl.controller.ledger_state import Audit, LedgerState
from llamarl.view.tails import SegmentTail

_decode = msgspec.json.Decoder(Record).decode
_AGAIN_S = 5.0  # seconds between two audits of a live run
Step = tuple[int, str, tuple[Any, ...]]  # number of the record, kind, details


class LedgerReader:
    """Reads the ledger as it grows. `updates_of` and `life` know the groups that are not folded into totals."""

    def __init__(self, folder: Path) -> None:
        self._tail, self._lock = SegmentTail(folder), threading.Lock()
        self._state, self._lives = LedgerState(), dict[int, list[Step]]()
        self._rewinds: list[tuple[int, int, str]] = []  # record number, update, who
        self._num_records = 0
        self._damage = ""
        self._audited: tuple[float, int, Audit] | None = None

    def refresh(self) -> None:
        with self._lock:
            for _, _, data in self._tail.read():
                try:
                    record = _decode(data)
                except msgspec.MsgspecError as error:
                    self._damage = f"a record of the ledger cannot be read: {error}"
                    continue
                self._num_records += 1
                self._state.add(record)
                self._note(record)

    def _note(self, record: Record) -> None:
        match record:
            case ledger.Issued():
                self._step(record.ordinal, "issued", record.executor, record.version)
            case ledger.Passed():
                facts = (record.num_tokens, record.first_version, record.last_version, record.reward)
                self._step(record.ordinal, record.state, *facts)
            case ledger.Dropped():
                self._step(record.ordinal, "dropped", record.reason)
            case ledger.Replaced():
                self._step(record.ordinal, "dropped", ledger.NO_VARIANCE)
            case ledger.Trained():
                for ordinal in record.ordinals:
                    self._step(ordinal, "trained", record.update)
            case ledger.Rewound():
                self._rewinds.append((self._num_records, record.to_update, record.executor))
            case LedgerTotals():
                self._restore(record)

    def _step(self, ordinal: int, kind: str, *details: Any) -> None:
        self._lives.setdefault(ordinal, []).append((self._num_records, kind, details))

    def _restore(self, totals: LedgerTotals) -> None:
        """Take groups over from totals that stand in the place of records we never saw."""
        for ordinal, state, *facts in totals.passed:
            if ordinal not in self._lives:
                self._step(ordinal, state, *facts)
        for ordinal, reasons in totals.dropped:
            if not self._has(ordinal, "dropped"):
                self._step(ordinal, "dropped", *reasons[:1])
        for ordinal, _ in totals.replaced:
            if not self._has(ordinal, "dropped"):
                self._step(ordinal, "dropped", ledger.NO_VARIANCE)
        for ordinal, updates in totals.trained:
            if updates and not self._has(ordinal, "trained"):
                self._step(ordinal, "trained", updates[-1])

    def _has(self, ordinal: int, kind: str) -> bool:
        return any(step[1] == kind for step in self._lives.get(ordinal, ()))

    # Answers

    def audit(self) -> dict[str, Any]:
        """The verdict of `llamarl audit`, with what the page shows around it."""
        self.refresh()
        with self._lock:
            found = self._audit()
            folded = self._state.folded
            return {
                **msgspec.to_builtins(found),
                "unfinished": list(found.unfinished[:50]),
                "clean": found.clean,
                "only_unfinished": found.only_unfinished,
                "consistent": found.consistent,
                "tokens": self._state.num_tokens,
                "folded_updates": folded.updates,
                "folded_groups": folded.trained + sum(folded.dropped.values()) + folded.replaced,
                "listed": len(self._lives),
                "states": dict(Counter(steps[-1][1] for steps in self._lives.values())),
                "rewind_list": [{"to_update": update, "executor": who} for _, update, who in self._rewinds[-50:]],
                "damage": self._damage,
            }

    def _audit(self) -> Audit:
        now = time.monotonic()
        if self._audited is None or (self._num_records != self._audited[1] and now > self._audited[0] + _AGAIN_S):
            self._audited = (now, self._num_records, self._state.audit())
        return self._audited[2]

    def groups(self, state: str, offset: int, limit: int, around: int = -1) -> dict[str, Any]:
        """A page of groups, newest first; `state` selects those whose last step is of this kind. `around`: start there."""
        self.refresh()
        with self._lock:
            chosen = [o for o, steps in self._lives.items() if not state or steps[-1][1] == state]
            chosen.sort(reverse=True)
            if around >= 0:
                chosen = [ordinal for ordinal in chosen if ordinal <= around]
            rows = [self._row(ordinal) for ordinal in chosen[offset : offset + limit]]
            return {"total": len(chosen), "offset": offset, "groups": rows}

    def _row(self, ordinal: int) -> dict[str, Any]:
        steps = []
        for number, kind, details in self._lives[ordinal]:
            step: dict[str, Any] = {"kind": kind, "details": list(details)}
            if kind == "trained" and any(at > number and to <= details[0] for at, to, _ in self._rewinds):
                step["taken_back"] = True
            steps.append(step)
        return {"ordinal": ordinal, "steps": steps}

    def life(self, ordinal: int) -> dict[str, Any] | None:
        self.refresh()
        with self._lock:
            return self._row(ordinal) if ordinal in self._lives else None

    def update_of(self, ordinal: int) -> int | None:
        """The update that trained the group last, if the ledger lists it."""
        trained = [step[2][0] for step in self._lives.get(ordinal, ()) if step[1] == "trained"]
        return int(trained[-1]) if trained else None

    def batch(self, update: int) -> list[int]:
        """The groups of an update, if the ledger lists them."""
        return sorted(self._state.batches.get(update, ()))
