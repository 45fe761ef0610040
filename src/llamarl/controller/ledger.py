"""The ledger: an append-only record of what became of every group, and the audit that reads nothing else.

Records are JSON, kept in checksummed segments, so that a person can read them and a torn or altered one is recognised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from llamarl.errors import InputError
from llamarl.segments import read_records, segment_files


class LedgerRecord(Struct, frozen=True, tag=True, tag_field="record"):
    pass


class Opened(LedgerRecord, frozen=True):
    num_groups: int
    groups_per_update: int


class Issued(LedgerRecord, frozen=True):
    """The group was handed to an executor of the first role, which holds `version`."""

    ordinal: int
    executor: str
    version: int


class Passed(LedgerRecord, frozen=True):
    """The group got through one role: `state` is "generated", "scored" ..."""

    ordinal: int
    state: str
    num_tokens: int
    first_version: int
    last_version: int
    reward: float


class Dropped(LedgerRecord, frozen=True):
    ordinal: int
    reason: str


class Trained(LedgerRecord, frozen=True):
    """Every role that trains has seen these groups; `dropped` ones had a place in the batch, but nothing in it."""

    update: int
    ordinals: tuple[int, ...]
    dropped: tuple[int, ...] = ()


class Visible(LedgerRecord, frozen=True):
    version: int


RESUME = "resume"


class Rewound(LedgerRecord, frozen=True):
    """An executor that trains came back from a snapshot, or (RESUME) the whole job did: updates from `to_update` on do not
    count any more."""

    to_update: int
    executor: str


FINISHED = "finished"


class Closed(LedgerRecord, frozen=True):
    """The last record of a job that ended by itself: FINISHED, or why it stopped before."""

    reason: str


Record = Opened | Issued | Passed | Dropped | Trained | Visible | Rewound | Closed

_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return msgspec.json.encode(record)


def read_ledger(folder: Path) -> Iterator[Record]:
    """All whole records, in order. A torn end (a crash while writing) is left out; damage anywhere else is an error."""
    if not segment_files(folder):
        raise InputError(f"{folder}: no ledger there")
    for _, record in read_records(folder):
        try:
            yield _decoder.decode(record)
        except msgspec.MsgspecError as error:
            raise InputError(f"{folder}: not a ledger record: {error}") from None


def canonical(records: Iterable[Record]) -> list[tuple[int, int, int, float, int]]:
    """What became of every trained group, whatever happened on the way: (ordinal, versions, reward, update)."""
    passed: dict[int, Passed] = {}
    update_of: dict[int, int] = {}
    for record in records:
        match record:
            case Passed():
                passed[record.ordinal] = record
            case Trained():
                update_of.update(dict.fromkeys(record.ordinals, record.update))
            case _:
                pass
    return [
        (ordinal, passed[ordinal].first_version, passed[ordinal].last_version, passed[ordinal].reward, update)
        for ordinal, update in sorted(update_of.items())
    ]


class Audit(Struct, frozen=True):
    """What the ledger says: each list of problems is empty when every group is accounted for."""

    num_groups: int
    trained: int
    dropped: dict[str, int]
    updates: int
    rewinds: int
    unfinished: tuple[int, ...]
    counted_twice: tuple[int, ...]
    never_issued: tuple[int, ...]
    closed: str

    @property
    def clean(self) -> bool:
        return not (self.unfinished or self.counted_twice or self.never_issued) and bool(self.closed)

    @property
    def only_unfinished(self) -> bool:
        """Stopped, killed or still running, with every group so far in order: it can be resumed."""
        in_order = not (self.counted_twice or self.never_issued)
        return in_order and not self.clean and self.closed != FINISHED


def audit(records: Iterable[Record]) -> Audit:
    """Per ordinal exactly one `trained` or `dropped` that no later rewind cancels."""
    trained_in: dict[int, list[int]] = {}
    dropped: dict[int, list[str]] = {}
    updates: set[int] = set()
    num_groups, rewinds, closed = 0, 0, ""
    issued: set[int] = set()
    for record in records:
        match record:
            case Opened():
                num_groups = record.num_groups
            case Issued():
                issued.add(record.ordinal)
            case Trained():
                updates.add(record.update)
                for ordinal in record.ordinals:
                    trained_in.setdefault(ordinal, []).append(record.update)
            case Dropped():
                dropped.setdefault(record.ordinal, []).append(record.reason)
            case Rewound():
                rewinds += 1
                updates = {update for update in updates if update < record.to_update}
                for made_in in trained_in.values():
                    made_in[:] = [update for update in made_in if update < record.to_update]
            case Closed():
                closed = record.reason
            case _:
                pass
    expected = set(range(num_groups)) | issued | trained_in.keys() | dropped.keys()
    count = {ordinal: len(trained_in.get(ordinal, [])) + len(dropped.get(ordinal, [])) for ordinal in expected}
    reasons = [reason for reasons in dropped.values() for reason in reasons]
    return Audit(
        num_groups=num_groups,
        trained=sum(1 for made_in in trained_in.values() if made_in),
        dropped={reason: reasons.count(reason) for reason in sorted(set(reasons))},
        updates=len(updates),
        rewinds=rewinds,
        unfinished=tuple(sorted(ordinal for ordinal, times in count.items() if times == 0)),
        counted_twice=tuple(sorted(ordinal for ordinal, times in count.items() if times > 1)),
        never_issued=tuple(sorted((trained_in.keys() | dropped.keys()) - issued)),
        closed=closed,
    )
