"""A recorded event log replays its run: the same events, told to a fresh controller, must give the same commands.

Each events file of a run folder begins with what its controller was made of. What the replayed controller writes is held
against the ledger, which is what the real one wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from llamarl.config import Evaluate, Schedule, Snapshots
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.ledger import RESUME, Record, Rewound, read_ledger
from llamarl.controller.line import Channel, Line, Role
from llamarl.errors import InputError


class Setting(Struct, frozen=True, tag=True, tag_field="event"):
    """All that a controller is made of."""

    roles: tuple[Role, ...]
    channels: tuple[Channel, ...]
    schedule: Schedule
    evaluate: Evaluate
    snapshots: Snapshots

    def make_controller(self) -> Controller:
        return Controller(Line(self.roles, self.channels), self.schedule, self.evaluate, self.snapshots)


class Replay(Struct, frozen=True):
    """`difference` is empty when the replayed controllers wrote what the ledger holds."""

    runs: int
    num_events: int
    num_records: int  # that were held against the ledger
    difference: str = ""


_decode_setting = msgspec.json.Decoder(Setting).decode
_decode_event = msgspec.json.Decoder(ev.AnyEvent).decode


def replay(folder: Path, events_name: str, ledger_name: str) -> Replay:
    """All runs of a folder, the first and those that resumed it."""
    files = _event_files(folder / events_name)
    ledger = list(read_ledger(folder / ledger_name))
    at = num_events = num_records = 0
    for number, file in enumerate(files):
        events = _read(file)
        written = list(_written(events, file))
        num_events += len(events) - 1
        held = ledger[at : _end_of_run(ledger, at)]
        for index, (ours, theirs) in enumerate(zip(written, held, strict=False)):
            if ours != theirs:
                where = f"{file.name}, record {index}"
                return Replay(number + 1, num_events, num_records, f"{where}: replayed {ours}, the ledger has {theirs}")
            num_records += 1
        at += len(held)
    return Replay(len(files), num_events, num_records)


def _written(lines: list[bytes], file: Path) -> Iterator[Record]:
    try:
        controller = _decode_setting(lines[0]).make_controller()
        for line in lines[1:]:
            for command in controller.handle(_decode_event(line)):
                if isinstance(command, ev.Write):
                    yield command.record
    except msgspec.MsgspecError as error:
        raise InputError(f"{file}: not an event log: {error}") from None


def _end_of_run(ledger: list[Record], start: int) -> int:
    """Each later run begins with a rewind of its own kind. A killed run may lack its last events, or its last records."""
    for index in range(start + 1, len(ledger)):
        record = ledger[index]
        if isinstance(record, Rewound) and record.executor == RESUME:
            return index
    return len(ledger)


def _read(file: Path) -> list[bytes]:
    *lines, _torn = file.read_bytes().split(b"\n")
    if not lines:
        raise InputError(f"{file}: is empty; a run that was killed early leaves nothing to replay")
    return lines


def _event_files(first: Path) -> list[Path]:
    def numbered(number: int) -> Path:
        return first.with_name(first.name + (f".{number}" if number else ""))

    files: list[Path] = []
    while numbered(len(files)).is_file():
        files.append(numbered(len(files)))
    if not files:
        raise InputError(f"{first.parent}: no run folder with an event log")
    return files


def setting_of(controller: Controller) -> Setting:
    line, evaluate = controller.line, controller.evaluation.settings
    return Setting(line.roles, line.channels, controller.schedule, evaluate, controller.snapshots)
