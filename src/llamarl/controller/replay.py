"""A recorded event log replays its run: the same events, told to a fresh controller, must give the same commands.

Each log begins with the settings of its controller. The records that the replayed controller writes are compared with the
ledger, which the real one wrote: one by one, or by a digest where the ledger has folded its records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec import Struct

from llamarl.config import EvaluateConfig, ScheduleConfig, SnapshotsConfig
from llamarl.controller import events as ev
from llamarl.controller.controller import Controller
from llamarl.controller.ledger import LedgerTotals, Record, RunRecords
from llamarl.controller.ledger_state import LedgerState, add_to_run
from llamarl.controller.line import Channel, Line, Role


class Setting(Struct, frozen=True, tag=True, tag_field="event"):
    """Everything that a controller is made from."""

    roles: tuple[Role, ...]
    channels: tuple[Channel, ...]
    schedule: ScheduleConfig
    evaluate: EvaluateConfig
    snapshots: SnapshotsConfig

    def make_controller(self) -> Controller:
        return Controller(Line(self.roles, self.channels), self.schedule, self.evaluate, self.snapshots)


class Replay(Struct, frozen=True):
    """`difference` is empty when the replayed controllers wrote what the ledger holds."""

    runs: int
    num_events: int
    num_records: int  # number of records that were compared with the ledger
    difference: str = ""
    notes: tuple[str, ...] = ()


LOG_FULL = b'{"event":"LogFull"}'  # the last line of a log that reached its size limit
_OLD_KINDS = (b"broadcast", b"scatter", b"gather")  # of channels for groups, in older logs
_decode_event = msgspec.json.Decoder(ev.AnyEvent).decode


class _Part(Struct):
    """The ledger's records of one start of the job: the folded ones as a digest, the others in full."""

    folded: RunRecords
    records: list[Record]


def replay(logs: Mapping[int, Iterable[bytes]], ledger: Iterable[Record]) -> Replay:
    """Replay all starts of a job, by their numbers. A log may end early: a crash can lose the last events or records."""
    ledger_state, parts = LedgerState(), dict[int, _Part]()
    for record in ledger:
        ledger_state.add(record)
        _assign(parts, ledger_state, record)
    num_events = num_records = 0
    notes: list[str] = []
    for run in sorted(parts.keys() | logs.keys()):
        part = parts.get(run, _Part(RunRecords(run, 0, ""), []))
        told, compared, difference = _replay_run(run, logs.get(run, ()), part, notes)
        num_events += told
        num_records += compared
        if difference:
            return Replay(len(logs), num_events, num_records, difference, tuple(notes))
        if not told and (part.folded.num_records or part.records):
            notes.append(f"run {run}: no events are left of it; it was killed early, or wrote none (observe.events_mb)")
    found = ledger_state.audit()
    if not found.consistent:
        lists = {"counted more than once": found.counted_twice, "never issued": found.never_issued}
        wrong = "; ".join(f"{len(groups)} groups {what}" for what, groups in lists.items() if groups)
        return Replay(len(logs), num_events, num_records, f"the ledger contradicts itself: {wrong}", tuple(notes))
    return Replay(len(logs), num_events, num_records, notes=tuple(notes))


def _assign(parts: dict[int, _Part], ledger_state: LedgerState, record: Record) -> None:
    if isinstance(record, LedgerTotals):
        parts.clear()
        parts.update({folded.run: _Part(folded, []) for folded in record.runs})
    else:
        run = ledger_state.runs[-1].run
        parts.setdefault(run, _Part(RunRecords(run, 0, ""), [])).records.append(record)


def _replay_run(run: int, lines: Iterable[bytes], part: _Part, notes: list[str]) -> tuple[int, int, str]:
    """Returns the number of events, the number of compared records, and the first difference."""
    digest, at, folded, log = RunRecords(run, 0, ""), 0, part.folded, _Log(lines)
    for record in _written(log):
        if digest.num_records < folded.num_records:
            digest = add_to_run(digest, record)
        elif at < len(part.records):
            if record != part.records[at]:
                where = f"run {run}, record {folded.num_records + at}"
                return log.num_events, at, f"{where}: replayed {record}, the ledger has {part.records[at]}"
            at += 1
    if log.damaged:
        notes.append(f"run {run}: its log is damaged at event {log.num_events}; it was replayed up to there")
    if log.num_events and not log.full and not log.damaged and digest != folded:
        return log.num_events, at, f"run {run}: its first {folded.num_records} records, now folded, were other ones"
    return log.num_events, at + (folded.num_records if digest == folded else 0), ""


class _Log:
    """The lines of a log, counted while they are read. The first line is not an event but the setting."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines, self.num_events = lines, 0
        self.full = self.damaged = False

    def __iter__(self) -> Iterator[bytes]:
        for number, line in enumerate(self._lines):
            if line == LOG_FULL:
                self.full = True
                return
            self.num_events = number
            yield line


def _written(log: _Log) -> Iterator[Record]:
    controller: Controller | None = None
    try:
        for line in log:
            if controller is None:
                controller = _decode_setting(line).make_controller()
                continue
            for command in controller.handle(_decode_event(line)):
                if isinstance(command, ev.Write):
                    yield command.record
    except (msgspec.MsgspecError, UnicodeDecodeError):
        log.damaged = True


def _decode_setting(line: bytes) -> Setting:
    for kind in _OLD_KINDS:
        line = line.replace(b'"kind":"' + kind + b'"', b'"kind":"groups"')
    return msgspec.json.decode(line, type=Setting)


def setting_of(controller: Controller) -> Setting:
    line, evaluate = controller.line, controller.evaluation.settings
    return Setting(line.roles, line.channels, controller.schedule, evaluate, controller.snapshots.settings)
