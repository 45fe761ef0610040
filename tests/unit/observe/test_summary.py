"""The figures of a run add up, also if an update had nothing to learn or was made twice."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from llamarl.config import Config, ScheduleConfig
from llamarl.config.file import load_config
from llamarl.observe.display import Progress, Quiet, format_seconds, line_of
from llamarl.observe.final_report import print_report, report_lines
from llamarl.observe.run_folder import METRICS, SUMMARY, TIMINGS, RunFolder
from llamarl.observe.starts import Starts
from llamarl.observe.summary import Summary, Tally
from llamarl.observe.timeline import Span
from llamarl.observe.watcher import Watcher
from llamarl.types import GroupFacts


def metrics(groups: int, tokens: int, staleness: float, staleness_max: int, reward: float) -> dict[str, float]:
    return {
        "groups": float(groups),
        "trained_tokens": float(tokens),
        "staleness_mean": staleness,
        "staleness_max": float(staleness_max),
        "reward": reward,
    }


def test_totals_by_hand() -> None:
    tally = Tally()
    tally.add_update(0, metrics(4, 100, 0.0, 0, 0.2))
    tally.add_update(1, metrics(3, 300, 1.0, 2, 0.4))
    assert (tally.updates, tally.groups_trained, tally.tokens_trained, tally.staleness_max) == (2, 7, 400, 2)
    assert tally.staleness_mean == pytest.approx(0.75), "a mean over tokens, not over updates"
    assert tally.rewards == [0.2, 0.4]


def test_rows_of_data_are_no_groups_without_variance() -> None:
    tally = Tally()
    tally.add_update(0, {**metrics(8, 100, 0.0, 0, 0.5), "sft_rows": 6.0, "zero_variance_share": 0.5})
    assert (tally.groups_trained, tally.groups_without_variance) == (8, 1)


def test_an_update_without_anything_to_learn_is_counted_as_one() -> None:
    tally = Tally()
    tally.add_update(0, {"groups": 0.0, "completions": 0.0, "trained_tokens": 0.0})
    assert (tally.updates, tally.groups_trained, tally.staleness_mean, tally.rewards) == (1, 0, 0.0, [])


def test_an_update_that_is_made_again_after_a_rewind_counts_once() -> None:
    tally = Tally()
    for update in (0, 1, 2, 1, 2, 3):
        found = metrics(4, 100, update / 10, update, update / 10)
        tally.add_update(update, {**found, "zero_variance_share": 0.25 * update})
    assert (tally.updates, tally.groups_trained, tally.tokens_trained) == (4, 16, 400)
    assert tally.groups_without_variance == 1 + 2 + 3
    assert tally.staleness_mean == pytest.approx((0.0 + 0.1 + 0.2 + 0.3) / 4)
    assert tally.rewards == [0.0, 0.1, 0.2, 0.3]


@pytest.fixture
def watcher(tmp_path: Path) -> Watcher:
    config = Config(schedule=ScheduleConfig(updates=20))
    folder = RunFolder.create(tmp_path / "run", ("critic", "trainer"))
    return Watcher(config, folder, Quiet(), tally=Tally(), first_role="generator", last_role="trainer")


def run_to_the_end(watcher: Watcher) -> Summary:
    watcher.evaluated(0, 0.25, 8)
    for update in range(20):
        watcher.group_done("generator/0", GroupFacts(num_tokens=10))
        watcher.group_done("reward/0", GroupFacts(num_tokens=10))
        watcher.batch_done("critic/0", update, {"loss": 1.0})
        watcher.batch_done("trainer/0", update, metrics(2, 10, 1.0, 1, update / 20))
    watcher.dropped(3, "time-out")
    watcher.restarted("generator/0")
    watcher.evaluated(20, 0.75, 8)
    return watcher.finish("finished", "snapshots/20/policy")


def test_the_summary_of_a_run_by_hand(watcher: Watcher, tmp_path: Path) -> None:
    summary = run_to_the_end(watcher)
    assert (summary.eval_before, summary.eval_after) == (0.25, 0.75)
    assert (summary.updates, summary.groups_trained, summary.groups_dropped) == (20, 40, 1)
    assert (summary.tokens_generated, summary.tokens_trained) == (200, 200), "only the first role generates"
    assert (summary.staleness_mean, summary.staleness_max, summary.restarts) == (1.0, 1, 1)
    assert summary.reward_first == pytest.approx((0.0 + 0.05) / 2), "the first tenth"
    assert summary.reward_last == pytest.approx((0.9 + 0.95) / 2), "the last tenth"
    assert 0 <= summary.train_s <= summary.wall_s
    written = msgspec.json.decode((tmp_path / "run" / SUMMARY).read_bytes(), type=Summary)
    assert written == summary


def test_summary_json_has_every_figure_that_is_promised(watcher: Watcher, tmp_path: Path) -> None:
    run_to_the_end(watcher)
    promised = {
        "eval_before",
        "eval_after",
        "updates",
        "groups_trained",
        "staleness_mean",
        "staleness_max",
        "idle_share",
        "wall_s",
        "tokens_generated",
        "tokens_trained",
    }
    assert promised <= json.loads((tmp_path / "run" / SUMMARY).read_text()).keys()


def test_wall_times_stay_out_of_the_metrics(watcher: Watcher, tmp_path: Path) -> None:
    """The metrics of two runs with the same seed can be compared byte by byte."""
    run_to_the_end(watcher)
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert not any(key.endswith("_s") for line in lines for key in line)
    assert [line["update"] for line in lines if line.get("role") == "trainer"] == list(range(20))
    timings = [json.loads(line) for line in (tmp_path / "run" / TIMINGS).read_text().splitlines()]
    assert [line["update"] for line in timings if "update" in line] == list(range(20))


def test_a_run_that_failed_before_its_first_update_has_a_summary_too(watcher: Watcher) -> None:
    watcher.spent("trainer/0", [Span("work", "slice", 0.0, 0.0)])
    summary = watcher.finish("trainer/0 died: out of memory", "")
    assert summary.outcome == "trainer/0 died: out of memory"
    assert (summary.updates, summary.eval_before, summary.reward_last, summary.policy) == (0, None, 0.0, "")


def test_the_report_shows_the_summary_and_takes_paths_literally(watcher: Watcher, tmp_path: Path) -> None:
    summary = run_to_the_end(watcher)
    text = "\n".join(report_lines(summary, Path("runs/[bold]x")))
    assert "0.250 -> 0.750" in text
    assert "40 trained, 1 dropped" in text
    flat = "\n".join(report_lines(msgspec.structs.replace(summary, groups_without_variance=7), Path("runs/x")))
    assert "40 trained (7 without variance), 1 dropped" in flat
    (tmp_path / "mine.py").write_text("def score(completion, answer): return 1.0")
    for run in range(2):
        config = load_config(None, [f"reward.scorer={tmp_path}/mine.py:score"])
        Starts(tmp_path).add(config, run=run, version=run, at="now")
        (tmp_path / "mine.py").write_text("def score(completion, answer): return 0.1")
    assert report_lines(summary, tmp_path)[-1].startswith(f"NOTE: {tmp_path}/mine.py was changed between starts: ")
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(console, summary, Path("runs/[bold]x"))
    assert "runs/[bold]x/snapshots/20/policy" in console.export_text()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3599.6, "1 h 00 min"),
        (7380, "2 h 03 min"),
    ],
)
def test_seconds_are_told_as_people_tell_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_time_left_is_that_of_the_updates_left() -> None:
    snapshot = Progress(
        update=5,
        updates=20,
        metrics={"reward": 0.5},
        tokens_generated=100,
        tokens_trained=50,
        elapsed_s=10.0,
        waiting={"trainer/0": 0.25},
        accuracy=None,
    )
    assert snapshot.left_s == pytest.approx(30.0)
    assert "update    5 of 20" in line_of(snapshot)
    assert "30 s left" in line_of(snapshot)
    assert "trainer/0 25%" in line_of(snapshot)
    assert (snapshot.generated_per_s, snapshot.trained_per_s) == (10.0, 5.0)
