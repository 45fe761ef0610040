"""One `.safetensors` file: its header, checked before it is trusted, and reads of exact byte ranges.

The safetensors library maps files into memory: a file that shrinks while it is read kills the process, and resident memory
counts the model twice (benchmarks/load_time.py). Here, only the requested bytes are read, into memory that the caller owns.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from llamarl.errors import ModelError
from llamarl.layout.boxes import Box
from llamarl.model.folders import is_git_lfs_pointer

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_NAME_CHARS = 200


class TensorSpan(Struct, frozen=True):
    """A tensor's place in its file; `offset` counts from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def dtypes(self) -> set[str]:
        """The types of its numbers; those of matrices that are kept apart may differ."""
        return {self.dtype}


def read_spans(path: Path) -> dict[str, TensorSpan]:
    """Maps each tensor name to its span, after checking the header against the file's length and layout."""
    header, data_start, num_data_bytes = _read_header(path)
    spans = {name: _span(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"}
    end = data_start
    for name, span in sorted(spans.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if span.offset != end:
            what = "overlaps the tensor before it" if span.offset < end else "leaves a gap before it"
            raise ModelError(f"{path}: header: tensor {name} {what}; the file is damaged")
        end = span.offset + span.num_bytes
    if end != data_start + num_data_bytes:
        found, told = num_data_bytes, end - data_start
        what = "cut short, as by a broken download; fetch it again" if found < told else "damaged"
        raise ModelError(f"{path}: header tells of {told} bytes of tensors, the file holds {found}; it is {what}")
    return spans


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    try:
        with path.open("rb") as file:
            num_file_bytes = os.fstat(file.fileno()).st_size
            length_bytes = file.read(8)
            if len(length_bytes) < 8:
                raise ModelError(f"{path}: {num_file_bytes} bytes long; too short for a safetensors file")
            if is_git_lfs_pointer(length_bytes):
                raise ModelError(
                    f"{path}: only a Git LFS pointer; run `git lfs pull` in that folder to get the weights"
                )
            length = int.from_bytes(length_bytes, "little")
            if not 2 <= length <= min(num_file_bytes - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path}: header length {length} does not fit a file of {num_file_bytes} bytes")
            header = _parse(path, file.read(length))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    return header, 8 + length, num_file_bytes - 8 - length


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ModelError(f"{path}: header names something twice; the file is damaged")
        return table

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: header is not valid JSON; the file is damaged") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: header is not a JSON object; the file is damaged")
    return header


def _span(path: Path, name: str, entry: object, data_start: int) -> TensorSpan:
    if not name.isprintable() or len(name) > _MAX_NAME_CHARS:
        raise ModelError(f"{path}: header: a tensor's name is not printable or too long; the file is damaged")
    where = f"{path}: header: tensor {name}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{where} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{where} has an impossible shape or offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(f"{where} has dtype {str(dtype)[:20]!r}; supported: {', '.join(ITEM_BYTES)}")
    num_bytes = offsets[1] - offsets[0]
    if math.prod(shape) * ITEM_BYTES[dtype] != num_bytes:
        raise ModelError(f"{where}: its shape in {dtype} does not fill its {num_bytes} bytes")
    return TensorSpan(path, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


def segments(span: TensorSpan, box: Box) -> Iterator[tuple[int, int]]:
    """The (offset, length) runs of the file that hold a box of a tensor, in row-major order."""
    run = ITEM_BYTES[span.dtype]
    inner = len(box)
    while inner and box[inner - 1] == (0, span.shape[inner - 1]):
        inner -= 1
        run *= span.shape[inner]
    yield from _runs(span.shape[:inner], box[:inner], span.offset, run)


def _runs(shape: tuple[int, ...], box: Box, base: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    if len(box) <= 1:
        first, end = box[0] if box else (0, 1)
        yield base + first * row_bytes, max(0, end - first) * row_bytes
        return
    stride = math.prod(shape[1:]) * row_bytes
    for index in range(*box[0]):
        yield from _runs(shape[1:], box[1:], base + index * stride, row_bytes)


class SegmentReader:
    """Reads runs of one file, one after another, into buffers of any size."""

    def __init__(self, span: TensorSpan, box: Box) -> None:
        self._path = span.path
        self._segments = segments(span, box)
        self._offset, self._left = 0, 0
        self._fd = -1

    def __enter__(self) -> SegmentReader:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"{self._path}: cannot be read ({error.strerror})") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def fill(self, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            while not self._left:
                self._offset, self._left = next(self._segments)
            num_bytes = self._read(buffer[done : done + self._left])
            done += num_bytes
            self._offset += num_bytes
            self._left -= num_bytes

    def _read(self, buffer: memoryview) -> int:
        try:
            num_bytes = os.preadv(self._fd, [buffer], self._offset)
        except OSError as error:
            raise ModelError(f"{self._path}: cannot be read ({error.strerror})") from None
        if not num_bytes:
            raise ModelError(f"{self._path}: became shorter while it was read")
        return num_bytes


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The header for tensors (dtype, shape) in this order; padded so that the data starts aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
