"""Synced records can be read back, a truncated end is skipped, and damage anywhere else is reported with its place."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.errors import InputError
from llamarl.io.record_log import SegmentWriter, read_records, segment_files

RECORDS = [b"first", b"", b"third, with \n and \x00 inside", b"\xff" * 100, b"last"]


def write(folder: Path, records: list[bytes], max_bytes: int = 1 << 20) -> list[int]:
    writer = SegmentWriter(folder, max_bytes)
    numbers = [writer.append(record) for record in records]
    writer.close()
    return numbers


def read(folder: Path) -> list[bytes]:
    return [record for _, record in read_records(folder)]


@settings(max_examples=40)
@given(st.lists(st.lists(st.binary(max_size=60), max_size=6), max_size=4), st.integers(1, 200))
def test_everything_is_read_back_in_order_over_restarts_and_segments(lives: list[list[bytes]], max_bytes: int) -> None:
    with TemporaryDirectory() as folder:
        where = [number for records in lives for number in write(Path(folder), records, max_bytes)]
        expected = [record for records in lives for record in records]
        assert list(read_records(Path(folder))) == list(zip(where, expected, strict=True))
        assert where == sorted(where)


def test_a_segment_ends_when_it_is_full(tmp_path: Path) -> None:
    numbers = write(tmp_path, [b"x" * 40] * 10, max_bytes=100)
    assert numbers == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(segment_files(tmp_path)) == 5


def test_what_was_synced_is_there_while_the_writer_lives(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.append(b"one")
    writer.sync()
    assert read(tmp_path) == [b"one"]
    writer.close()


def test_a_torn_end_is_left_out_wherever_it_was_torn(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    (file,) = segment_files(tmp_path)
    whole = file.read_bytes()
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        found = read(tmp_path)
        assert found == RECORDS[: len(found)]
        kept = sum(12 + len(record) for record in RECORDS[: len(found) + 1])
        assert length == len(whole) or length < kept, "a whole record was left out"


def test_an_end_that_never_reached_the_disk_is_left_out(tmp_path: Path) -> None:
    """After a power cut, a file may have its full length but contain zeros."""
    write(tmp_path, RECORDS)
    (file,) = segment_files(tmp_path)
    whole = file.read_bytes()
    for zeros in (1, 11, 12, 13, 4096):
        file.write_bytes(whole + b"\x00" * zeros)
        assert read(tmp_path) == RECORDS
    file.write_bytes(whole[:-2] + b"\x00\x00")
    assert read(tmp_path) == RECORDS[:-1]


def test_a_changed_byte_before_the_last_record_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    (file,) = segment_files(tmp_path)
    whole = file.read_bytes()
    last = len(whole) - 12 - len(RECORDS[-1])
    for at in range(last):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=f"{file.name}: damaged at byte"):
            read(tmp_path)


def test_a_changed_byte_never_gives_a_record_that_was_not_written(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    (file,) = segment_files(tmp_path)
    whole = file.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x01
        file.write_bytes(damaged)
        with suppress(InputError):
            assert read(tmp_path) == RECORDS[:-1]


def test_nothing_is_written_behind_a_torn_end(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    (file,) = segment_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-2])
    write(tmp_path, [b"after the crash"])
    assert read(tmp_path) == [*RECORDS[:-1], b"after the crash"]
    assert len(segment_files(tmp_path)) == 2


def test_whole_segments_can_be_removed_but_not_the_one_being_written(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, max_bytes=1)
    for record in (b"a", b"b", b"c"):
        writer.append(record)
    writer.sync()
    writer.remove(0)
    writer.remove(2)
    assert read(tmp_path) == [b"b", b"c"]
    writer.close()


def test_other_files_in_the_folder_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    (tmp_path / ".partial").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    assert read(tmp_path) == RECORDS
    assert read(tmp_path / "nowhere") == []
