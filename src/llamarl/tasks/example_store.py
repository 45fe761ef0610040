"""Examples by number, with little memory: encoded, and in an unnamed temporary file once they are many."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Sequence
from typing import IO, Any, overload

import msgspec
from numpy.typing import NDArray

from llamarl.errors import InputError
from llamarl.tasks.examples import Example
from llamarl.tasks.task import Lazily

IN_MEMORY_BYTES = 64 << 20


class ExampleStore(Sequence[Example]):
    """Examples of one kind, in the order in which they were added. Beyond `in_memory` bytes they lie on the disk of
    $TMPDIR."""

    def __init__(self, in_memory: int = IN_MEMORY_BYTES, *, kind: type[Example] = Example) -> None:
        self._in_memory = in_memory
        self._ends = array("q")
        self._kept = bytearray()
        self._file: IO[bytes] | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    @property
    def on_disk(self) -> bool:
        return self._file is not None

    def add(self, example: Example) -> None:
        encoded = self._encode(example)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(encoded))
        self._kept += encoded
        if len(self._kept) > self._in_memory:
            self._spill()

    def _spill(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="llamarl-data-")  # noqa: SIM115, it lives as long as the store
            self._file.write(self._kept)
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"task.path: the data do not fit into {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a larger disk"
            ) from None
        self._kept.clear()

    def chosen(self, numbers: NDArray[Any] | Sequence[int]) -> Lazily[Example]:
        """The examples with these numbers, read when they are needed."""
        return Lazily(self.__getitem__, numbers)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return self.chosen(range(len(self))[index])
        number = range(len(self))[index]
        start, end = (self._ends[number - 1] if number else 0), self._ends[number]
        on_disk = self._ends[-1] - len(self._kept)
        if start >= on_disk:
            return self._decode(bytes(self._kept[start - on_disk : end - on_disk]))
        assert self._file is not None
        return self._decode(os.pread(self._file.fileno(), end - start, start))
