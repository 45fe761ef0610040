"""Time not covered by any span is waiting, in the summary and in the trace file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.observe.timeline import Span, Timeline


def work(start_s: float, end_s: float) -> Span:
    return Span("work", "slice", start_s, end_s)


def timeline_of(**executors: list[Span]) -> Timeline:
    timeline = Timeline()
    for name, spans in executors.items():
        timeline.add(name.replace("_", "/"), spans)
    return timeline


def test_idle_share_by_hand() -> None:
    """In ten seconds, one generator works 6 s, the other 2 s, and the trainer publishes for 1 s and works for 8 s."""
    timeline = timeline_of(
        generator_0=[work(0, 4), work(5, 7)],
        generator_1=[work(3, 5)],
        trainer_0=[Span("weights", "PublishWeights", 0, 1), work(2, 10)],
    )
    assert timeline.idle_share(0, 10) == pytest.approx({"generator": (0.4 + 0.8) / 2, "trainer": 0.1})


def test_only_what_lies_inside_the_interval_counts() -> None:
    timeline = timeline_of(trainer_0=[work(0, 3), work(4, 6), work(9, 20)])
    assert timeline.busy_s("trainer/0", 2, 10) == pytest.approx(1 + 2 + 1)
    assert timeline.busy_s("trainer/0", 6.5, 8.5) == 0.0
    assert timeline.busy_s("nobody/0", 0, 10) == 0.0


def test_spans_that_come_in_parts_are_one_record() -> None:
    timeline = timeline_of(trainer_0=[work(0, 3)])
    timeline.add("trainer/0", [work(4, 6)])
    assert timeline.idle_share(0, 10) == pytest.approx({"trainer": 0.5})


def test_an_interval_without_length_is_no_division_by_zero() -> None:
    assert 0.0 <= timeline_of(trainer_0=[work(0, 3)]).idle_share(2, 2)["trainer"] <= 1.0


spans = st.lists(
    st.tuples(st.sampled_from(["work", "weights", "save"]), st.floats(0.001, 5), st.floats(0, 3)), max_size=8
)


@given(spans, st.floats(0, 3), st.floats(0.1, 30))
def test_the_trace_covers_the_whole_run_with_work_and_waiting(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Any], start_s: float, length_s: float
) -> None:
    timeline, at = Timeline(), start_s
    timeline.add("trainer/0", [])
    for kind, duration_s, gap_s in drawn:
        timeline.add("trainer/0", [Span(kind, kind, at + gap_s, at + gap_s + duration_s)])
        at += gap_s + duration_s
    end_s = max(at, start_s + length_s)
    path = tmp_path_factory.getbasetemp() / "timeline.json"
    timeline.write(path, start_s, end_s)
    rows = [row for row in json.loads(path.read_text())["traceEvents"] if row["ph"] == "X"]
    assert sum(row["dur"] for row in rows) == pytest.approx((end_s - start_s) * 1e6, abs=5 * (len(rows) + 1))
    assert all(row["dur"] >= 0 for row in rows)
    waited = sum(row["dur"] for row in rows if row["cat"] == "wait") / 1e6
    assert waited == pytest.approx((end_s - start_s) - timeline.busy_s("trainer/0", start_s, end_s), abs=1e-4)


def test_the_trace_names_every_executor_and_draws_waiting_between_its_spans(tmp_path: Path) -> None:
    timeline = timeline_of(
        trainer_0=[work(12, 13)], generator_0=[work(10, 11), Span("weights", "LoadWeights", 11.5, 12)]
    )
    timeline.write(tmp_path / "timeline.json", 10, 14)
    rows = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert sorted(names.values()) == ["generator/0", "trainer/0"]
    drawn = {
        name: [(row["cat"], row["ts"], row["dur"]) for row in rows if row["ph"] == "X" and row["tid"] == track]
        for track, name in names.items()
    }
    assert drawn["generator/0"] == [
        ("work", 0.0, 1e6),
        ("wait", 1e6, 5e5),
        ("weights", 1.5e6, 5e5),
        ("wait", 2e6, 2e6),
    ]
    assert drawn["trainer/0"] == [("wait", 0.0, 2e6), ("work", 2e6, 1e6), ("wait", 3e6, 1e6)]


def test_a_very_long_run_keeps_its_last_spans_and_the_sum_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.observe.timeline.MAX_SPANS", 10)
    timeline = timeline_of(trainer_0=[work(2 * at, 2 * at + 1) for at in range(1000)])
    track = timeline.spans["trainer/0"]
    assert len(track) <= 10
    assert [span.start_s for span in track][-1] == 1998
    assert timeline.idle_share(0, 2000) == pytest.approx({"trainer": 0.5})
    assert timeline.busy_s("trainer/0", 1996.5, 1999) == pytest.approx(0.5 + 1)


def test_who_joined_waits_only_while_it_is_there(tmp_path: Path) -> None:
    timeline = timeline_of(trainer_0=[work(0, 10)], generator_1=[work(2, 3), work(7, 8)])
    for joined_s, left_s in [(2, 4), (6, 8)]:
        timeline.joined("generator/1", joined_s)
        timeline.left("generator/1", left_s)
    assert timeline.waiting(0, 10) == pytest.approx({"trainer/0": 0.0, "generator/1": 0.5})
    assert timeline.waiting(8, 10).keys() == {"trainer/0"}
    timeline.write(tmp_path / "trace.json", 0, 10)
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [(row["ts"] / 1e6, row["name"]) for row in rows if row["ph"] == "X" and row["tid"] == 0]
    assert drawn == [(2, "slice"), (3, "wait"), (6, "wait"), (7, "slice")]


def test_other_ranks_have_lanes_of_their_own_and_count_nowhere_else(tmp_path: Path) -> None:
    timeline = timeline_of(trainer_0=[work(0, 5)])
    for rank in (1, 2, 10):
        timeline.add("trainer/0", [work(0, 10)], rank)
    assert timeline.waiting(0, 10) == pytest.approx({"trainer/0": 0.5})
    assert timeline.idle_share(0, 10) == pytest.approx({"trainer": 0.5})
    timeline.write(tmp_path / "trace.json", 0, 10)
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["ph"] == "M"]
    assert names == ["trainer/0", "trainer/0 rank 1", "trainer/0 rank 2", "trainer/0 rank 10"]
