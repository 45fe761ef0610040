"""Reads the header of a GGUF file: its key-value fields and the places of its tensors, with every length checked.

The `gguf` package reads headers too, but trusts them: a damaged length makes it loop for ever. It is used only to dequantize
blocks.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from llamarl.errors import ModelError

# GGML's number of each encoding: its name, weights per block, bytes per block.
KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


class GGUFTensor(Struct, frozen=True):
    """A tensor of the file. `shape` is in row-major order, the reverse of the file's."""

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def num_bytes(self) -> int:
        _, block, block_bytes = KINDS[self.kind]
        return math.prod(self.shape) // block * block_bytes


class GGUFFile(Struct, frozen=True):
    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """The verified header of a GGUF file."""
    if not path.is_file():
        raise ModelError(f"no file {path}; expected a GGUF model")
    try:
        with path.open("rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._left = self._num_file_bytes = os.fstat(file.fileno()).st_size

    def read(self) -> GGUFFile:
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self._path}: not a GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise ModelError(f"{self._path}: GGUF version {version} is not supported; supported: 2, 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            self._check_name(name, fields)
            fields[name] = self._value(self._number("I"))
        return GGUFFile(self._path, fields, self._tensors(num_tensors, self._alignment(fields)))

    def _tensors(self, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
        found: dict[str, GGUFTensor] = {}
        for _ in range(num_tensors):
            name = self._text()
            self._check_name(name, found)
            found[name] = self._tensor(name, alignment)
        header_end = self._num_file_bytes - self._left
        start = -(-header_end // alignment) * alignment
        placed = {name: GGUFTensor(t.shape, t.kind, start + t.offset) for name, t in found.items()}
        end = start
        for name, tensor in sorted(placed.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise self._damaged(f"tensor {name} overlaps another")
            end = tensor.offset + tensor.num_bytes
            if end > self._num_file_bytes:
                raise self._damaged(f"tensor {name} ends beyond the file")
        return placed

    def _tensor(self, name: str, alignment: int) -> GGUFTensor:
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in KINDS:
            supported = ", ".join(name for name, _, _ in KINDS.values())
            raise ModelError(f"{self._path}: tensor {name} has encoding {kind}, not supported; supported: {supported}")
        if offset % alignment or shape[-1] % KINDS[kind][1] or not all(shape):
            raise self._damaged(f"tensor {name} has an impossible shape or offset")
        return GGUFTensor(shape, kind, offset)

    def _alignment(self, fields: dict[str, Any]) -> int:
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"alignment is {alignment!r}")
        return alignment

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in _SCALARS:
            raise self._damaged(f"a field has type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in _SCALARS:
            data = self._take(length * struct.calcsize(_SCALARS[kind]))
            return list(struct.unpack(f"<{length}{_SCALARS[kind]}", data))
        if kind != _STRING or length * 8 > self._left:
            raise self._damaged("an array has an impossible type or length")
        return [self._text() for _ in range(length)]

    def _text(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError:
            raise self._damaged("a text is not UTF-8") from None

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._left:
            raise self._damaged("the header ends beyond the file")
        self._left -= num_bytes
        return self._file.read(num_bytes)

    def _check_name(self, name: str, names: dict[str, Any]) -> None:
        if not name.isprintable():
            raise self._damaged("a name is not printable")
        if name in names:
            raise self._damaged(f"{name} is there twice")

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: {what}; the file is damaged or incomplete")
