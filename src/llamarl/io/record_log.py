"""A log of records on disk, in append-only segment files. Ledger, GroupStore and kept rollouts are such logs.

A record is a header (length, checksum, and a checksum of these two) and its bytes. A crash can only truncate the end of the
segment being written. A restart begins a new segment, so that nothing is ever written after a truncated end. Damage anywhere
else is an error that names the place.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from llamarl.errors import InputError
from llamarl.failpoints import failpoint
from llamarl.io.append_file import AppendFile

_FACTS = struct.Struct("<II")  # length, crc32 of the record
_HEADER = struct.Struct("<III")  # length, crc32 of the record, crc32 of these eight bytes
MAX_SEGMENT_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20


class SegmentWriter:
    """Appends records to the newest segment of a folder, and begins another when it is full."""

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max_bytes = folder, max_bytes or MAX_SEGMENT_BYTES
        numbers = [int(path.name) for path in segment_files(folder)]
        self.number = max(numbers, default=-1)
        self.offset = 0  # byte in its segment at which the last record begins
        self._file: AppendFile | None = None

    def append(self, record: bytes) -> int:
        """Append a record, which is safe after the next `sync`. Returns the number of its segment."""
        if self._file is None or self._file.num_bytes >= self._max_bytes:
            self.begin_segment()
        assert self._file is not None
        facts = _FACTS.pack(len(record), zlib.crc32(record))
        failpoint("segment.write")
        self.offset = self._file.num_bytes
        self._file.append(facts + zlib.crc32(facts).to_bytes(4, "little") + record)
        return self.number

    def flush(self) -> None:
        """Write everything to the operating system, so that other processes can read it."""
        if self._file is not None:
            self._file.flush()

    def sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            failpoint("segment.sync")
            self._file.sync()

    def remove(self, number: int) -> None:
        """Delete a segment, unless it is the one being written."""
        if number != self.number:
            failpoint("segment.remove")
            (self._folder / f"{number:08}").unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def begin_segment(self) -> None:
        """Close the current segment, if any, and begin the next."""
        self.close()
        self.number += 1
        failpoint("segment.begin")
        self._file = AppendFile(self._folder / f"{self.number:08}", buffer_bytes=_BUFFER_BYTES, exclusive=True)
        sync_path(self._folder)


def segment_files(folder: Path) -> list[Path]:
    """The segments of a folder, oldest first; empty if there is no such folder."""
    return sorted(path for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def read_records(folder: Path, on_damage: Callable[[str], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (segment, record) of every complete record, in the order of writing. Damage raises InputError; with `on_damage`,
    that is called instead, and reading continues where possible."""
    for path in segment_files(folder):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        for _, record in _records(path, data, on_damage or _refuse):
            yield int(path.name), record


def read_segment(path: Path, start: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yield (start, end, record) of the complete records of one segment from byte `start` on, a block of the file at a
    time. Stops at an incomplete or damaged header; records whose checksum is wrong are left out."""
    with path.open("rb") as file:
        file.seek(start)
        data, at = b"", start
        while block := file.read(_BLOCK_BYTES):
            data += block
            here = 0
            while here + _HEADER.size <= len(data):
                length, checksum, header_checksum = _HEADER.unpack_from(data, here)
                end = here + _HEADER.size + length
                if zlib.crc32(data[here : here + _FACTS.size]) != header_checksum:
                    return
                if end > len(data):
                    if length > _BLOCK_BYTES:
                        data += file.read(end - len(data))
                        if end <= len(data):
                            continue
                    break
                record = data[here + _HEADER.size : end]
                if zlib.crc32(record) == checksum:
                    yield at + here, at + end, record
                here = end
            data, at = data[here:], at + here


def read_record(folder: Path, segment: int, offset: int) -> bytes:
    """The record that begins at byte `offset` of a segment. InputError if there is no complete record."""
    path = folder / f"{segment:08}"
    try:
        with path.open("rb") as file:
            file.seek(offset)
            header = file.read(_HEADER.size)
            whole = len(header) == _HEADER.size and zlib.crc32(header[: _FACTS.size]) == _HEADER.unpack(header)[2]
            length, checksum, _ = _HEADER.unpack(header) if whole else (0, 0, 0)
            record = file.read(length)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not whole or len(record) < length or zlib.crc32(record) != checksum:
        raise InputError(f"{path}: no whole record at byte {offset}")
    return record


class RecordTail:
    """Reads a log that may still be growing: each `read` returns the records that became complete since the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segment, self._offset = 0, 0  # the next record begins here, or in a later segment
        self.damage: list[str] = []  # one line for each place that cannot be read

    def read(self) -> list[bytes]:
        found: list[bytes] = []
        for path in segment_files(self._folder):  # all but the last of them are complete, whatever is written meanwhile
            number = int(path.name)
            if number < self._segment:
                continue
            start = self._offset if number == self._segment else 0
            self._segment, self._offset = number, start
            for end, record in _records(path, _bytes_from(path, start), self._note, start):
                self._offset = end
                found.append(record)
        return found

    def _note(self, damage: str) -> None:
        if damage not in self.damage:
            self.damage.append(damage)


def _bytes_from(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _refuse(damage: str) -> None:
    raise InputError(damage)


def _records(path: Path, data: bytes, on_damage: Callable[[str], None], begin: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield each record, after the byte of the file at which it ends. `data` is the file from byte `begin` on."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, checksum, header_checksum = _HEADER.unpack_from(data, at)
        start, end = at + _HEADER.size, at + _HEADER.size + length
        if zlib.crc32(data[at : at + _FACTS.size]) != header_checksum:
            if any(data[at:]):  # otherwise truncated: the file had grown, but held no bytes yet
                on_damage(f"{path}: damaged at byte {begin + at} (a record's header is wrong)")
            return  # without this length, the next record cannot be found
        if end > len(data):
            return  # truncated: the crash came before the record was complete
        record = data[start:end]
        if zlib.crc32(record) == checksum:
            yield begin + end, record
        elif end == len(data):
            return  # truncated: the length reached the disk, but not all of the bytes
        else:
            on_damage(f"{path}: damaged at byte {begin + at} (the record's checksum does not match)")
        at = end


def sync_path(path: Path) -> None:
    """Sync a file's bytes, or a folder's entries, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
