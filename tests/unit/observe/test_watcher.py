"""The live view's shares of waiting, rates and time left are right for long updates and after a resume."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamarl.config import Config, GeneratorConfig, ScheduleConfig
from llamarl.engine.engine import Arrival
from llamarl.engine.envelope import Envelope
from llamarl.engine.supervision import Rank, Supervision
from llamarl.io.append_file import AppendFile
from llamarl.machine import MemoryPeak
from llamarl.messages import BatchResult, DecodingCounted
from llamarl.observe.display import Progress
from llamarl.observe.final_report import report_lines
from llamarl.observe.rows import read_rows
from llamarl.observe.run_folder import SPANS, TIMINGS, RunFolder
from llamarl.observe.span_rows import SpanRows
from llamarl.observe.summary import MEMORY, Tally
from llamarl.observe.timeline import Span
from llamarl.observe.watcher import Watcher
from llamarl.types import GroupFacts

CONFIG = Config(schedule=ScheduleConfig(updates=20, groups_per_update=4, samples_per_group=2))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


class Shown:
    """A display that records its calls."""

    def __init__(self) -> None:
        self.snapshots: list[Progress] = []
        self.answers: list[tuple[int, int]] = []
        self.notes: list[str] = []

    def progress(self, done: int, of: int) -> None:
        self.answers.append((done, of))

    def update(self, snapshot: Progress) -> None:
        self.snapshots.append(snapshot)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        pass


def make_watcher(folder: Path, shown: Shown, tally: Tally, config: Config = CONFIG) -> Watcher:
    run_folder = RunFolder.create(folder / "run")
    return Watcher(config, run_folder, shown, tally=tally, first_role="generator", last_role="trainer")


def test_shares_of_waiting_leave_out_the_start_and_cover_long_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, shown = Clock(monkeypatch), Shown()
    watcher = make_watcher(tmp_path, shown, Tally())
    clock.now_s = 160.0  # after a minute of startup
    watcher.group_done("generator/0", GroupFacts(num_tokens=10))
    for update in range(2):  # the trainer works for 30 of every 40 seconds, and reports it when it is done
        began_s = clock.now_s
        clock.now_s += 40.0
        watcher.spent("trainer/0", [Span("work", "update", began_s + 10.0, clock.now_s)])
        watcher.batch_done("trainer/0", update, {"trained_tokens": 400.0})
    assert [snapshot.waiting["trainer/0"] for snapshot in shown.snapshots] == [pytest.approx(0.25)] * 2


def test_rates_and_time_left_are_of_this_start_of_a_resumed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, shown, tally = Clock(monkeypatch), Shown(), Tally()
    for update in range(10):
        tally.add_update(update, {"trained_tokens": 1000.0})
    tally.tokens_generated = 50_000
    watcher = make_watcher(tmp_path, shown, tally)
    watcher.group_done("generator/0", GroupFacts(num_tokens=300))
    for update in (10, 11):
        clock.now_s += 5.0
        watcher.batch_done("trainer/0", update, {"trained_tokens": 200.0})
    last = shown.snapshots[-1]
    assert last.update == 12
    assert last.left_s == pytest.approx(8 * 5.0)
    assert last.generated_per_s == pytest.approx(30.0)
    assert last.trained_per_s == pytest.approx(40.0)


def test_answers_are_counted_until_the_first_update(tmp_path: Path) -> None:
    shown = Shown()
    watcher = make_watcher(tmp_path, shown, Tally())
    for _ in range(3):
        watcher.group_done("generator/0", GroupFacts())
        watcher.group_done("reward/0", GroupFacts())
    watcher.batch_done("trainer/0", 0, {})
    watcher.group_done("reward/0", GroupFacts())
    assert shown.answers == [(2, 8), (4, 8), (6, 8)]


def test_dropped_groups_do_not_flood_the_screen(tmp_path: Path) -> None:
    shown = Shown()
    watcher = make_watcher(tmp_path, shown, Tally())
    for ordinal in range(1000):
        watcher.dropped(ordinal, "too long")
    assert len(shown.notes) == 5 + 7
    assert shown.notes[-1] == "1000 groups dropped so far, the last: too long"


class Ears(Supervision[Rank]):
    def _cut(self, state: Rank) -> None:
        pass

    def _kill(self, state: Rank) -> None:
        pass


def test_how_the_time_of_an_update_was_spent_is_heard_before_the_update() -> None:
    ears, span = Ears(CONFIG), Span("work", "update", 1.0, 2.0)
    ears._hear_envelope(Rank("trainer/0", 0, 0), Envelope((BatchResult(0, {}),), (span,)))
    told = [arrival for arrival in ears._take_arrivals() if isinstance(arrival, Arrival)]
    assert [bool(arrival.spans) for arrival in told] == [True, False]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (GeneratorConfig(), {}),
        (GeneratorConfig(draft=8), {"drafted_tokens": 7, "accepted_drafts": 4}),
        (GeneratorConfig(slots=64, prefill_beside=128), {"tokens_read_beside": 300}),
    ],
)
def test_what_is_switched_on_is_counted_in_every_update(
    settings: GeneratorConfig, told: dict[str, int], tmp_path: Path
) -> None:
    """0 says that it never applied."""
    watcher = make_watcher(tmp_path, Shown(), Tally(), replace(CONFIG, generator=settings))
    names = ("drafted_tokens", "accepted_drafts", "tokens_read_beside")
    watcher.decoding_counted(DecodingCounted(3, 2, 100))
    watcher.decoding_counted(DecodingCounted(4, 2, 200))
    for expected in (told, dict.fromkeys(told, 0)):
        watcher.batch_done("trainer/0", 0, {})
        assert {name: value for name, value in last_row(watcher).items() if name in names} == expected


def test_memory_is_that_of_the_largest_rank_of_each_role(tmp_path: Path) -> None:
    """A replica that restarted and held less, and one that looked at its GPU earlier, take nothing away."""
    watcher = make_watcher(tmp_path, Shown(), Tally())
    watcher.held("trainer/0", MemoryPeak(1 << 30, 8 << 30, 60 << 30, 80 << 30))
    watcher.held("generator/0", MemoryPeak(1 << 30, 20 << 30, 50 << 30, 80 << 30))
    watcher.held("generator/1", MemoryPeak(2 << 30, 4 << 30, 20 << 30, 80 << 30))
    watcher.held("reward/0", MemoryPeak(3 << 29))
    watcher.batch_done("trainer/0", 0, {})
    told = {name: value for name, value in last_row(watcher).items() if name.endswith(MEMORY)}
    assert told == {
        "generator_memory_gib": 20.0,
        "reward_memory_gib": 1.5,
        "trainer_memory_gib": 8.0,
        "gpu_memory_gib": 60.0,
    }
    summary = watcher.finish("finished", "")
    line = next(line for line in report_lines(summary, tmp_path) if line.startswith("memory"))
    assert line.split(maxsplit=1)[1] == (
        "generator 20.0 GiB, reward 1.5 GiB, trainer 8.0 GiB; the fullest GPU 60.0 of 80.0 GiB"
    )


def test_memory_that_nobody_told_is_left_out(tmp_path: Path) -> None:
    watcher = make_watcher(tmp_path, Shown(), Tally())
    watcher.batch_done("trainer/0", 0, {})
    assert not any(name.endswith(MEMORY) for name in last_row(watcher))
    assert not any(line.startswith("memory") for line in report_lines(watcher.finish("finished", ""), tmp_path))


def last_row(watcher: Watcher) -> dict[str, Any]:
    return read_rows(watcher._folder.path / TIMINGS)[-1]


def test_what_happens_is_written_while_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is killed now leaves its spans, deaths and snapshots."""
    clock = Clock(monkeypatch)
    watcher = make_watcher(tmp_path, Shown(), Tally())
    watcher.begin()
    clock.now_s = 103.0
    watcher.spent("trainer/0", [Span("work", "WorkOnBatch", 101.0, 103.0)])
    watcher.batch_done("trainer/0", 0, {"reward": 0.5})
    watcher.spent("generator/0", [Span("work", "slice", 103.0, 104.0)])
    watcher.died("generator/0", "killed by signal 9")
    watcher.restarted("generator/0")
    watcher.saved(1)
    rows = read_rows(tmp_path / "run" / TIMINGS)
    assert rows[0]["start"] == 0 and rows[0]["unix_s"] > 0
    assert [row for row in rows if "died" in row] == [
        {"executor": "generator/0", "at_s": 3.0, "died": "killed by signal 9"}
    ]
    assert any(row.get("restarted") for row in rows) and {"snapshot": 1, "at_s": 3.0} in rows
    first = {"start": 0, "spans": {"trainer/0": [["work", "WorkOnBatch", 1.0, 3.0]]}}
    assert read_rows(tmp_path / "run" / SPANS) == [first], "the spans of an update are written with it"
    watcher.finish("finished", "")
    assert len(read_rows(tmp_path / "run" / SPANS)) == 2


@pytest.mark.parametrize("max_mb", [0, 1])
def test_spans_stop_at_their_limit_and_say_so(tmp_path: Path, max_mb: int) -> None:
    file = AppendFile(tmp_path / SPANS)
    rows = SpanRows(file, 0, 0.0, max_mb)
    for number in range(100_000):
        rows.add("reward/0", [Span("work", "WorkOnGroup", number, number + 0.5)])
        if number % 100 == 0:
            rows.flush()
    file.close()
    found = read_rows(tmp_path / SPANS)
    assert (tmp_path / SPANS).stat().st_size < max_mb * 1.01 * 2**20 + 1
    assert [row.get("full", False) for row in found[-2:]] == ([False, True] if max_mb else [])
