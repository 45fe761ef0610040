"""The run folder is the record: what a run wrote down is whole, agrees with itself, and shows the overlap."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.errors import ConfigError
from llamarl.observe.display import Display, Lines, LiveView, Progress, make_display

UPDATES, EXECUTORS = 8, ["generator/0", "reward/0", "trainer/0"]
OVERRIDES = [
    f"schedule.updates={UPDATES}",
    "schedule.groups_per_update=8",
    "schedule.samples_per_group=4",
    "schedule.max_staleness=1",
    "generator.slots=64",
    "generator.threads=1",
    "trainer.threads=1",
    "trainer.warmup_updates=0",
    "evaluate.prompts=8",
    "algo.zero_variance=keep",  # so that every update has tokens to train on
]


@dataclass(frozen=True)
class Span:
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Record:
    tracks: dict[str, list[Span]]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    timings: list[dict[str, Any]]

    def busy(self, executor: str) -> list[Span]:
        return [span for span in self.tracks[executor] if span.kind != "wait"]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("folder") / "run"
    Job(load_config(None, OVERRIDES)).run(folder)
    return Record(
        read_tracks(folder / "timeline.json"),
        json.loads((folder / "summary.json").read_text()),
        read_rows(folder / "metrics.jsonl"),
        read_rows(folder / "evaluations.jsonl"),
        read_rows(folder / "timings.jsonl"),
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_tracks(path: Path) -> dict[str, list[Span]]:
    """The trace format: "M" rows name the tracks, "X" rows are complete spans in microseconds."""
    rows = json.loads(path.read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["ph"] == "M" and row["name"] == "thread_name"}
    tracks: dict[str, list[Span]] = {name: [] for name in names.values()}
    for row in rows:
        if row["ph"] == "X":
            span = Span(row["cat"], row["ts"] / 1e6, (row["ts"] + row["dur"]) / 1e6)
            tracks[names[row["tid"]]].append(span)
    return tracks


def shared_s(ones: list[Span], others: list[Span]) -> float:
    """Seconds that lie in a span of both lists."""
    return sum(max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a in ones for b in others)


def test_the_timeline_has_a_track_per_executor_with_every_kind_of_span(record: Record) -> None:
    assert sorted(record.tracks) == EXECUTORS
    assert {span.kind for span in record.tracks["generator/0"]} == {"work", "weights", "wait"}
    assert {span.kind for span in record.tracks["reward/0"]} == {"work", "wait"}
    assert {span.kind for span in record.tracks["trainer/0"]} == {"work", "weights", "save", "wait"}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_spans_of_a_track_cover_the_run_without_overlap(record: Record, executor: str) -> None:
    spans = record.tracks[executor]
    assert spans[0].start_s == 0
    for before, after in pairwise(spans):
        assert after.start_s == pytest.approx(before.end_s, abs=1e-6)
    assert spans[-1].end_s == pytest.approx(record.summary["wall_s"], abs=0.01)


def test_generator_and_trainer_work_at_the_same_time(record: Record) -> None:
    shared = shared_s(record.busy("generator/0"), record.busy("trainer/0"))
    training = [span for span in record.tracks["trainer/0"] if span.kind == "work"]
    assert shared > 0.2 * sum(span.end_s - span.start_s for span in training)


def test_the_idle_share_is_what_the_timeline_says(record: Record) -> None:
    """Over the time from the first group to the last update."""
    end_s = [row["at_s"] for row in record.timings if "update" in row][-1]
    training = Span("", end_s - record.summary["train_s"], end_s)
    for executor in EXECUTORS:
        busy_s = shared_s(record.busy(executor), [training])
        share = 1 - busy_s / (training.end_s - training.start_s)
        assert record.summary["idle_share"][executor.partition("/")[0]] == pytest.approx(share, abs=1e-4)


def test_what_weights_cost_each_side_is_on_record(record: Record) -> None:
    for name, executor in (("sync_trainer_s", "trainer/0"), ("sync_generator_s", "generator/0")):
        rows = [row for row in record.timings if name in row]
        assert {row["version"] for row in rows} == set(range(UPDATES + 1))
        for row in rows:
            assert row["executor"] == executor
            assert row["gb_s"] == pytest.approx(row["bytes"] / row[name] / 1e9)
            assert 0 < row[name] < 10


def test_the_memory_of_every_role_is_on_record_and_never_shrinks(record: Record) -> None:
    assert sorted(record.summary["memory"]["roles"]) == ["generator", "reward", "trainer"]
    for role, last in record.summary["memory"]["roles"].items():
        told = [row[f"{role}_memory_gib"] for row in record.timings if "update" in row]
        assert told[0] > 0.05 and told == sorted(told) and told[-1] <= last < 24


def test_every_update_has_one_row_of_metrics_and_one_of_timings(record: Record) -> None:
    rows = record.metrics
    assert [row["update"] for row in rows] == list(range(UPDATES))
    assert [row["update"] for row in record.timings if "update" in row] == list(range(UPDATES))
    for row in rows:
        assert 0 <= row["reward"] <= 1
        assert 0 <= row["staleness_mean"] <= row["staleness_max"] <= 1
        assert row["groups"] == 8 and row["trained_tokens"] > 0
    assert not any(name.endswith("_s") for row in rows for name in row), "wall times would differ from run to run"


def test_the_summary_agrees_with_the_rows(record: Record) -> None:
    summary, rows = record.summary, record.metrics
    assert {row["version"]: row["accuracy"] for row in record.evaluations} == {
        0: summary["eval_before"],
        UPDATES: summary["eval_after"],
    }
    assert summary["updates"] == UPDATES
    assert summary["groups_trained"] == sum(row["groups"] for row in rows) == 8 * UPDATES
    assert summary["staleness_max"] == max(row["staleness_max"] for row in rows)
    tokens = [row["trained_tokens"] for row in rows]
    stale = sum(row["staleness_mean"] * row["trained_tokens"] for row in rows)
    assert summary["staleness_mean"] == pytest.approx(stale / sum(tokens))
    assert summary["tokens_trained"] == summary["tokens_generated"] == sum(tokens)
    assert sorted(summary["idle_share"]) == ["generator", "reward", "trainer"]
    assert 0 < summary["train_s"] < summary["wall_s"]


# What a person sees

SNAPSHOT = Progress(
    update=3,
    updates=10,
    metrics={"reward": 0.625, "staleness_mean": 0.75, "staleness_max": 1.0},
    tokens_generated=12_000,
    tokens_trained=9_000,
    elapsed_s=6.0,
    waiting={"generator/0": 0.25, "trainer/0": 0.5},
    accuracy=0.375,
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown_by(*, terminal: bool) -> tuple[Display, str]:
    text = io.StringIO()
    display = make_display(Console(file=text, force_terminal=terminal, width=100), quiet=False)
    display.note("held-out accuracy of version 0: 0.250")
    display.update(SNAPSHOT)
    display.close()
    return display, text.getvalue()


def test_a_terminal_shows_a_live_panel() -> None:
    display, text = shown_by(terminal=True)
    assert isinstance(display, LiveView)
    panel = re.sub(r"\s+", " ", ANSI.sub("", text))
    for fact in (
        "held-out accuracy of version 0: 0.250",
        "update 3 of 10",
        "14 s left",
        "reward 0.625 held-out accuracy 0.375",
        "staleness 0.75 (max 1)",
        "generated 2,000 tok/s trained 1,500 tok/s",
    ):
        assert fact in panel
    assert re.search(r"generator/0 \S+ waits 25% trainer/0 \S+ waits 50%", panel)


def test_without_a_terminal_there_are_plain_lines() -> None:
    display, text = shown_by(terminal=False)
    assert isinstance(display, Lines)
    assert text.splitlines() == [
        "held-out accuracy of version 0: 0.250",
        "update    3 of 10  reward 0.625  staleness 0.75  generated 2,000 tok/s  trained 1,500 tok/s  "
        "waiting: generator/0 25% trainer/0 50%  14 s left",
    ]


def test_tensorboard_without_its_package_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without_tensorboard(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "tensorboard" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_tensorboard)
    with pytest.raises(ConfigError) as refusal:
        Job(load_config(None, ["observe.tensorboard=true"]))
    assert str(refusal.value) == (
        "observe.loggers: the package of tensorboard is missing; pip install 'llamarl[tensorboard]'"
    )


def test_a_reader_of_the_output_that_leaves_does_not_end_the_job(tmp_path: Path) -> None:
    """As `llamarl train | head -1`."""
    settings = ["schedule.updates=3", *OVERRIDES[1:-2], "evaluate.prompts=0"]
    command = [sys.executable, "-m", "llamarl.cli", "train", *settings, "--run", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("run folder:")
        process.stdout.close()
        assert process.wait(120) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["updates"]) == ("finished", 3)
