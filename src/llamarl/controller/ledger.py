"""The ledger: an append-only record of what became of every group. `ledger_state.py` adds it up.

Records are JSON, kept in checksummed segments, so that a person can read them and a torn or altered one is recognized. The
ledger of a long run does not grow for ever: see `LedgerTotals`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from llamarl.errors import InputError
from llamarl.io.record_log import read_records, segment_files


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
    """The group has passed one role; `state` is that role's `done`, such as "generated" or "scored"."""

    ordinal: int
    state: str
    num_tokens: int
    first_version: int
    last_version: int
    reward: float


class Dropped(LedgerRecord, frozen=True):
    ordinal: int
    reason: str


class Replaced(LedgerRecord, frozen=True):
    """All rewards of the group are equal, so another one was taken into the batch of `update` in its place."""

    ordinal: int
    update: int


NO_VARIANCE = "no variance: replaced (schedule.dynamic_sampling)"  # the reason under which an audit counts such groups


class Trained(LedgerRecord, frozen=True):
    """Every role that trains has trained these groups. `dropped` groups had a place in the batch, but no tokens."""

    update: int
    ordinals: tuple[int, ...]
    dropped: tuple[int, ...] = ()


class Visible(LedgerRecord, frozen=True):
    version: int


RESUME = "resume"


class Rewound(LedgerRecord, frozen=True):
    """An executor that trains came back from a snapshot, or (RESUME) the whole job did: updates from `to_update` on do not
    count any more. For RESUME, `run` is the number of this start of the job; the first is 0."""

    to_update: int
    executor: str
    run: int = 0


FINISHED = "finished"


class Closed(LedgerRecord, frozen=True):
    """The last record of a job that ended by itself: FINISHED, or the reason why it stopped early."""

    reason: str


class Folded(Struct, frozen=True, omit_defaults=True):
    """Totals over the updates before `updates`. No job can go back behind that, so their groups are only counted."""

    updates: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}  # reason -> number of groups
    num_tokens: int = 0
    max_staleness: int = 0
    oldest: int = 0  # the smallest ordinal that is in none of their batches
    taken: tuple[int, ...] = ()  # larger ordinals that are in one
    digest: str = ""  # over the trained groups, update by update
    counted_twice: tuple[int, ...] = ()
    never_issued: tuple[int, ...] = ()
    replaced: int = 0  # number of groups that were replaced in their batches


class RunRecords(Struct, frozen=True, array_like=True):
    """The number of records that one start of the job wrote, and a digest over them, which `llamarl replay` compares."""

    run: int
    num_records: int
    digest: str


class LedgerTotals(LedgerRecord, frozen=True, omit_defaults=True, tag="Checkpoint"):
    """The sum of all records before it, whose place it takes. Old updates are folded into totals; the groups of the others
    are listed."""

    num_groups: int
    groups_per_update: int
    rewinds: int
    closed: str
    runs: tuple[RunRecords, ...]
    folded: Folded
    issued: tuple[int, ...]
    passed: tuple[tuple[int, str, int, int, int, float], ...]  # the fields of the last `Passed` of each group
    dropped: tuple[tuple[int, tuple[str, ...]], ...]
    updates: tuple[int, ...]  # updates that count
    batches: tuple[tuple[int, tuple[int, ...]], ...]  # by update, including those that a rewind took back
    trained: tuple[tuple[int, tuple[int, ...]], ...]  # ordinal and its updates that count
    replaced: tuple[tuple[int, int], ...] = ()  # ordinal and update of the fields of `Replaced`


Record = Opened | Issued | Passed | Dropped | Replaced | Trained | Visible | Rewound | Closed | LedgerTotals

_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return msgspec.json.encode(record)


def read_ledger(folder: Path) -> Iterator[Record]:
    """All whole records, in order. A torn end, from a crash while writing, is left out; damage elsewhere is an error."""
    if not segment_files(folder):
        raise InputError(f"{folder}: no ledger there")
    for _, record in read_records(folder):
        try:
            yield _decoder.decode(record)
        except msgspec.MsgspecError as error:
            raise InputError(f"{folder}: not a ledger record: {error}") from None
