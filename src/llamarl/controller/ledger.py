"""The ledger: an append-only record of what became of every group. `books.py` adds it up.

Records are JSON, kept in checksummed segments, so that a person can read them and a torn or altered one is recognized. The
ledger of a long run does not grow for ever: see `Checkpoint`.
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
    count any more. `run` numbers the starts of the job, 0 being the first; other rewinds have none."""

    to_update: int
    executor: str
    run: int = 0


FINISHED = "finished"


class Closed(LedgerRecord, frozen=True):
    """The last record of a job that ended by itself: FINISHED, or why it stopped before."""

    reason: str


class Folded(Struct, frozen=True, omit_defaults=True):
    """Totals over the updates before `updates`. No job can go back behind them, so their groups are only counted."""

    updates: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}  # reason -> groups
    num_tokens: int = 0
    max_staleness: int = 0
    oldest: int = 0  # the smallest ordinal that is in none of their batches
    taken: tuple[int, ...] = ()  # larger ordinals that are in one
    digest: str = ""  # over what became of every group, update by update
    counted_twice: tuple[int, ...] = ()
    never_issued: tuple[int, ...] = ()


class RunRecords(Struct, frozen=True, array_like=True):
    """How many records one start of the job wrote, and a digest over them: `llamarl replay` compares it."""

    run: int
    num_records: int
    digest: str


class LedgerTotals(LedgerRecord, frozen=True, omit_defaults=True, tag="Checkpoint"):
    """Everything that the records before it amount to: it takes their place. Old updates are folded into totals, the groups
    of the others are listed."""

    num_groups: int
    groups_per_update: int
    rewinds: int
    closed: str
    runs: tuple[RunRecords, ...]
    folded: Folded
    issued: tuple[int, ...]
    passed: tuple[tuple[int, str, int, int, int, float], ...]  # the fields of the last `Passed` of each group
    dropped: tuple[tuple[int, tuple[str, ...]], ...]
    updates: tuple[int, ...]  # those that count
    batches: tuple[tuple[int, tuple[int, ...]], ...]  # by update, also those that a rewind took back
    trained: tuple[tuple[int, tuple[int, ...]], ...]  # ordinal and the updates that count


Record = Opened | Issued | Passed | Dropped | Trained | Visible | Rewound | Closed | LedgerTotals

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
