"""Growing files: what is new is read once, what is half written waits, what was cut is read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llamarl.io.record_log import SegmentWriter
from llamarl.view.series import Columns, bin_updates, binned, smoothed
from llamarl.view.spans import MAX_DRAWN, SpanReader, SpanStore
from llamarl.view.tails import LineTail, SegmentTail


def rows(tail: LineTail) -> list[int]:
    return [row["n"] for _, row in tail.read()]


def test_lines_are_read_once_and_a_half_written_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = LineTail(path)
    assert rows(tail) == [], "no file yet"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"')
    assert rows(tail) == [1, 2]
    with path.open("a") as file:
        file.write(': 3}\nnot json\n{"n": 4}\n')
    assert rows(tail) == [3, 4]
    assert rows(tail) == []


def test_a_file_that_was_cut_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    tail = LineTail(path)
    assert rows(tail) == [1, 2, 3]
    path.write_text('{"n": 1}\n{"n": 7}\n{"n": 8}\n')
    assert rows(tail) == [1, 7, 8], "as long as before, but other rows"
    path.write_text('{"n": 1}\n')
    assert rows(tail) == [1]


def test_records_are_followed_from_segment_to_segment(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, max_bytes=64)
    for number in range(5):
        writer.append(bytes([number]) * 20)
    writer.sync()
    tail = SegmentTail(tmp_path)
    assert [record[0] for _, _, record in tail.read()] == [0, 1, 2, 3, 4]
    writer.append(b"\x05" * 3_000_000)  # larger than a block
    writer.append(b"\x06")
    writer.sync()
    assert [record[0] for _, _, record in tail.read()] == [5, 6]
    again = SegmentTail(tmp_path, tail.place)
    assert list(again.read()) == []


def test_a_torn_record_waits_until_it_is_whole(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "whole")
    for number in range(3):
        writer.append(bytes([number]) * 50)
    writer.sync()
    data = (tmp_path / "whole" / "00000000").read_bytes()
    folder = tmp_path / "torn"
    folder.mkdir()
    tail = SegmentTail(folder)
    for size in range(len(data) + 1):
        (folder / "00000000").write_bytes(data[:size])
        for _, offset, record in tail.read():
            assert record == bytes([offset // 62]) * 50 and size >= offset + 62
    assert tail.place == (0, len(data))


def test_bins_keep_the_mean_and_the_range() -> None:
    columns = Columns()
    for update in range(10_000):
        columns.add(update, {"reward": float(update % 10)})
    found = binned(columns.get("reward"), 0, 10_000, 100)
    assert found["mean"] == [4.5] * 100 and found["low"] == [0.0] * 100 and found["high"] == [9.0] * 100
    assert len(bin_updates(0, 10_000, 100)) == 100 and bin_updates(3, 6, 100) == [3, 4, 5]


def test_missing_and_infinite_values_are_gaps_and_no_zeros() -> None:
    columns = Columns()
    columns.add(0, {"gap": 0.5})
    columns.add(3, {"gap": float("inf"), "reward": 1.0})
    assert binned(columns.get("gap"), 0, 4, 10)["mean"] == [0.5, None, None, None]
    assert binned(columns.get("unknown"), 0, 4, 2)["mean"] == [None, None]


def test_smoothing_averages_over_the_last_known_values() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert np.allclose(smoothed(values, 2), [1.0, 1.0, 3.0, 4.0])


def test_waiting_is_what_no_span_covers() -> None:
    store = SpanStore()
    store.add("trainer/0", [("work", "a", 0.0, 1.0), ("weights", "b", 1.5, 2.0)])
    store.add("trainer/1", [])
    shares = store.waiting(np.array([0.0, 1.0, 2.0]))["trainer"]
    assert np.allclose(shares, [(0.0 + 1.0) / 2, (0.5 + 1.0) / 2])


def test_many_spans_become_shares_that_add_up_to_the_same() -> None:
    store = SpanStore()
    count = MAX_DRAWN + 100
    store.add("generator/0", [("work", "slice", n, n + 0.25) for n in range(count)])
    (few,) = store.drawn(0.0, 100.0, 10)
    (many,) = store.drawn(0.0, float(count), 10)
    assert len(few["spans"]) == 100 and "shares" not in few
    assert np.allclose(many["shares"]["work"], 0.25, atol=0.01) and abs(many["busy"] - 0.25) < 0.01


def test_spans_of_a_live_run_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    reader = SpanReader(path, tmp_path / "timeline.json")
    reader.refresh(0)
    assert reader.by_start == {}
    path.write_text('{"start":0,"spans":{"trainer/0":[["work","WorkOnBatch",0.0,1.0]]}}\n{"start":0,')
    reader.refresh(0)
    assert reader.by_start[0].lanes["trainer/0"].between(0.0, 9.0) == [("work", "WorkOnBatch", 0.0, 1.0)]
    path.write_text(path.read_text()[: -len('{"start":0,')] + '{"start":1,"full":true}\n')
    reader.refresh(1)
    assert reader.full
