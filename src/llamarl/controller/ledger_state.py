"""The state that a ledger's records add up to. Audit, resume and replay read it and nothing else.

Updates that can no longer be taken back are folded into totals, so that the state of a long run stays small. Folding changes
no answer: the audit, the digest and the data for a resume are the same with it as without.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice

import msgspec
from msgspec import Struct
from msgspec.structs import astuple, replace

from llamarl.controller import ledger
from llamarl.controller.ledger import Folded, LedgerTotals, Record, RunRecords

_MAX_LISTED = 1000  # number of ordinals that an audit names; the rest are only counted
_MAX_REASONS = 100  # number of reasons for drops that a fold tells apart
OTHER_REASONS = "other reasons"


class Audit(Struct, frozen=True):
    """The verdict on a ledger: each list of problems is empty when every group is accounted for. Long lists are cut off."""

    num_groups: int
    trained: int
    dropped: dict[str, int]
    updates: int
    rewinds: int
    max_staleness: int  # the largest staleness of a first token among all trained groups
    num_unfinished: int
    unfinished: tuple[int, ...]
    counted_twice: tuple[int, ...]
    never_issued: tuple[int, ...]
    closed: str
    digest: str  # the same for two runs that trained the same groups, on the same versions, with the same rewards

    @property
    def consistent(self) -> bool:
        """No record contradicts another; groups may still be under way."""
        return not (self.counted_twice or self.never_issued)

    @property
    def clean(self) -> bool:
        """The job has ended, and every group was trained exactly once or dropped with a reason."""
        return self.consistent and not self.num_unfinished and bool(self.closed)

    @property
    def only_unfinished(self) -> bool:
        """The run is stopped, killed or still going, with every group so far in order: it can be resumed."""
        return self.consistent and not self.clean and self.closed != ledger.FINISHED


class LedgerState:
    def __init__(self) -> None:
        self.num_groups = self._groups_per_update = self.rewinds = 0
        self.closed = ""
        self.folded = Folded()
        self.runs: list[RunRecords] = []
        # The following are about groups that are not folded:
        self._issued: set[int] = set()
        self._passed: dict[int, ledger.Passed] = {}
        self._dropped: dict[int, list[str]] = {}
        self._replaced: dict[int, list[int]] = {}  # ordinal -> updates; one, unless the ledger contradicts itself
        self._trained_in: dict[int, list[int]] = {}
        self._updates: set[int] = set()  # updates that count
        self.batches: dict[int, tuple[int, ...]] = {}  # by update; a batch that a rewind took back will be made again

    @classmethod
    def of(cls, records: Iterable[Record]) -> LedgerState:
        ledger_state = cls()
        for record in records:
            ledger_state.add(record)
        return ledger_state

    def add(self, record: Record) -> None:
        if isinstance(record, LedgerTotals):
            self._restore(record)
            return
        self._count_record(record)
        match record:
            case ledger.Opened():
                self.num_groups, self._groups_per_update = record.num_groups, record.groups_per_update
            case ledger.Issued():
                self._issued.add(record.ordinal)
            case ledger.Passed():
                self._passed[record.ordinal] = record
            case ledger.Trained():
                self._updates.add(record.update)
                self.batches[record.update] = tuple(sorted(record.ordinals + record.dropped))
                for ordinal in record.ordinals:
                    self._trained_in.setdefault(ordinal, []).append(record.update)
            case ledger.Dropped():
                self._dropped.setdefault(record.ordinal, []).append(record.reason)
            case ledger.Replaced():
                self._replaced.setdefault(record.ordinal, []).append(record.update)
            case ledger.Rewound():
                self._rewind(record)
            case ledger.Closed():
                self.closed = record.reason
            case ledger.Visible():
                pass

    # Answers

    @property
    def updates(self) -> int:
        """Number of updates that count."""
        return self.folded.updates + len(self._updates)

    @property
    def known_updates(self) -> int:
        """One more than the last update that counts. A snapshot of a later version does not belong to this ledger."""
        return 1 + max(self._updates, default=self.folded.updates - 1)

    @property
    def dropped(self) -> set[int]:
        """Dropped groups that are not folded."""
        return set(self._dropped)

    @property
    def drop_reasons(self) -> dict[int, str]:
        """Why each dropped group that is not folded was dropped."""
        return {ordinal: reasons[-1] for ordinal, reasons in self._dropped.items() if reasons}

    @property
    def num_dropped(self) -> int:
        return sum(self.folded.dropped.values()) + len(self._dropped)

    @property
    def replaced(self) -> dict[int, int]:
        """Replaced groups that are not folded, and the update in whose batch another one took their place."""
        return {ordinal: updates[-1] for ordinal, updates in self._replaced.items()}

    @property
    def num_replaced(self) -> int:
        return self.folded.replaced + len(self._replaced)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens of all groups."""
        return self.folded.num_tokens + sum(passed.num_tokens for passed in self._passed.values())

    def settled(self, state: str) -> dict[int, int]:
        """Maps each group in `state` to the newest version that sampled it."""
        return {o: passed.last_version for o, passed in self._passed.items() if passed.state == state}

    def audit(self) -> Audit:
        """Each ordinal must have exactly one `Trained`, `Dropped` or `Replaced` that no later rewind cancels."""
        folded = self.folded
        known = self._issued | self._trained_in.keys() | self._dropped.keys() | self._replaced.keys()
        counts = {o: self._count(o) for o in known}
        twice = [o for o, count in counts.items() if count + self._is_folded(o) > 1]
        unissued = [o for o, count in counts.items() if count and o not in self._issued]
        end = max(self.num_groups + self.num_replaced, folded.oldest)
        high = min(end, 1 + max(known | {*folded.taken, folded.oldest - 1}))
        missing = [o for o in range(folded.oldest, high) if not counts.get(o) and not self._is_folded(o)]
        missing += sorted(o for o, count in counts.items() if not count and not folded.oldest <= o < high)
        reasons = Counter(folded.dropped) + Counter(chain.from_iterable(self._dropped.values()))
        reasons += Counter({ledger.NO_VARIANCE: self.num_replaced})
        return Audit(
            num_groups=self.num_groups + self.num_replaced,
            trained=folded.trained + sum(1 for made_in in self._trained_in.values() if made_in),
            dropped=dict(sorted(reasons.items())),
            updates=self.updates,
            rewinds=self.rewinds,
            max_staleness=max(folded.max_staleness, self._max_staleness(self._trained_in)),
            num_unfinished=len(missing) + end - high,
            unfinished=tuple(islice(chain(missing, range(high, end)), _MAX_LISTED)),
            counted_twice=_listed({*folded.counted_twice, *twice}),
            never_issued=_listed({*folded.never_issued, *unissued}),
            closed=self.closed,
            digest=self._digest(),
        )

    def _digest(self) -> str:
        """Over what became of every trained group, update by update, whatever happened on the way."""
        found = self.folded.digest
        for update in sorted(self._updates):
            found = self._digest_update(found, update, self.batches[update])
        return found

    # Folding

    def fold(self, version: int) -> None:
        """Turn the updates before `version` into totals. No job may ever go back behind it."""
        for update in range(self.folded.updates, min(version, self.known_updates)):
            self._fold_update(update)

    def _fold_update(self, update: int) -> None:
        before, batch = self.folded, self.batches.pop(update)
        trained = [o for o in batch if self._trained_in.get(o)]
        reasons = Counter(before.dropped)
        for ordinal in batch:
            for reason in self._dropped.get(ordinal, ()):
                reasons[reason if reason in reasons or len(reasons) < _MAX_REASONS else OTHER_REASONS] += 1
        replaced = [o for o, updates in self._replaced.items() if updates[-1] <= update]
        gone = (*batch, *replaced)
        twice = (o for o in gone if self._count(o) != 1)
        again = (o for o in gone if self._is_folded(o))
        oldest, taken = before.oldest, {*before.taken, *gone}
        while oldest in taken:
            taken.remove(oldest)
            oldest += 1
        self.folded = Folded(
            updates=update + 1,
            trained=before.trained + len(trained),
            dropped=dict(sorted(reasons.items())),
            num_tokens=before.num_tokens + sum(self._passed[o].num_tokens for o in gone if o in self._passed),
            max_staleness=max(before.max_staleness, self._max_staleness(trained)),
            oldest=oldest,
            taken=tuple(sorted(o for o in taken if o > oldest)),
            digest=self._digest_update(before.digest, update, batch),
            counted_twice=_listed({*before.counted_twice, *twice, *again}),
            never_issued=_listed({*before.never_issued, *(o for o in gone if o not in self._issued)}),
            replaced=before.replaced + len(replaced),
        )
        for ordinal in gone:
            for kept in (self._passed, self._dropped, self._replaced, self._trained_in):
                kept.pop(ordinal, None)
        self._issued.difference_update(gone)
        self._updates.discard(update)

    def checkpoint(self) -> LedgerTotals:
        return LedgerTotals(
            num_groups=self.num_groups,
            groups_per_update=self._groups_per_update,
            rewinds=self.rewinds,
            closed=self.closed,
            runs=tuple(self.runs),
            folded=self.folded,
            issued=tuple(sorted(self._issued)),
            passed=tuple(astuple(passed) for _, passed in sorted(self._passed.items())),
            dropped=tuple((ordinal, tuple(reasons)) for ordinal, reasons in sorted(self._dropped.items())),
            updates=tuple(sorted(self._updates)),
            batches=tuple(sorted(self.batches.items())),
            trained=tuple((ordinal, tuple(made_in)) for ordinal, made_in in sorted(self._trained_in.items())),
            replaced=tuple((o, update) for o, updates in sorted(self._replaced.items()) for update in updates),
        )

    def _restore(self, record: LedgerTotals) -> None:
        self.num_groups, self._groups_per_update = record.num_groups, record.groups_per_update
        self.rewinds, self.closed, self.folded = record.rewinds, record.closed, record.folded
        self.runs = list(record.runs)
        self._issued = set(record.issued)
        self._passed = {fields[0]: ledger.Passed(*fields) for fields in record.passed}
        self._dropped = {ordinal: list(reasons) for ordinal, reasons in record.dropped}
        self._trained_in = {ordinal: list(made_in) for ordinal, made_in in record.trained}
        self._updates, self.batches = set(record.updates), dict(record.batches)
        self._replaced = {}
        for ordinal, update in record.replaced:
            self._replaced.setdefault(ordinal, []).append(update)

    # Details

    def _rewind(self, record: ledger.Rewound) -> None:
        self.rewinds += 1
        if record.executor == ledger.RESUME:
            self.closed = ""
        if record.to_update < self.folded.updates:  # this is always the very beginning: no older snapshot is kept
            self.folded = replace(Folded(), max_staleness=self.folded.max_staleness)
        self._updates = {update for update in self._updates if update < record.to_update}
        for made_in in self._trained_in.values():
            made_in[:] = [update for update in made_in if update < record.to_update]

    def _count_record(self, record: Record) -> None:
        if isinstance(record, ledger.Rewound) and record.executor == ledger.RESUME:
            self.runs.append(RunRecords(record.run or len(self.runs), 0, ""))
        elif not self.runs:
            self.runs.append(RunRecords(0, 0, ""))
        self.runs[-1] = add_to_run(self.runs[-1], record)

    def _count(self, ordinal: int) -> int:
        """How often the group was trained, dropped or replaced."""
        return sum(len(found.get(ordinal, ())) for found in (self._trained_in, self._dropped, self._replaced))

    def _is_folded(self, ordinal: int) -> bool:
        return 0 <= ordinal < self.folded.oldest or ordinal in self.folded.taken

    def _max_staleness(self, ordinals: Iterable[int]) -> int:
        found = ((o, made_in[-1]) for o in ordinals if (made_in := self._trained_in.get(o)) and o in self._passed)
        return max((update - self._passed[o].first_version for o, update in found), default=0)

    def _digest_update(self, before: str, update: int, batch: Iterable[int]) -> str:
        made = {o: self._passed[o] for o in batch if update in self._trained_in.get(o, ()) and o in self._passed}
        rows = [(o, passed.first_version, passed.last_version, passed.reward, update) for o, passed in made.items()]
        return _chain(before, msgspec.msgpack.encode(rows))


def audit(records: Iterable[Record]) -> Audit:
    return LedgerState.of(records).audit()


def add_to_run(run: RunRecords, record: Record) -> RunRecords:
    return RunRecords(run.run, run.num_records + 1, _chain(run.digest, ledger.encode_record(record)))


def _chain(before: str, data: bytes) -> str:
    return hashlib.blake2b(before.encode() + data, digest_size=16).hexdigest()


def _listed(ordinals: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ordinals)[:_MAX_LISTED])
