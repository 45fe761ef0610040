"""Data files as rows, one at a time: JSON lines, JSON, CSV and Parquet, plain or packed. An error names the line or row."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec

from llamarl.errors import ConfigError, InputError
from llamarl.tasks.data_layout import PACKED

Row = Mapping[str, Any]
T = TypeVar("T")
INSTALL = "pip install 'llamarl[data]'"
_CHUNK_CHARS = 1 << 20
_MAX_ROW_CHARS = 1 << 28
_BATCH_ROWS = 256


class BadRow(Exception):
    """A row cannot be used; the message says why."""


def read_rows(paths: Sequence[Path], convert: Callable[[Row], T | None]) -> Iterator[T]:
    """Yield convert(row) for each row of the files, leaving out rows for which it is None."""
    any_rows = False
    for path in paths:
        for number, row in _numbered_rows(path):
            where = f"{path}:{number}"
            try:
                if isinstance(row, BadRow):
                    raise row
                item = convert(row)
            except BadRow as error:
                raise InputError(f"{where}: {error}") from None
            except ConfigError as error:
                raise ConfigError(f"{error} ({where})") from None
            any_rows = True
            if item is not None:
                yield item
    if not any_rows:
        raise InputError(f"{paths[0]}: no rows")


Numbered = Iterator[tuple[int, Row | BadRow]]


def _numbered_rows(path: Path) -> Numbered:
    """(line, or number from 1 on) and row; a BadRow ends the file."""
    name = path.name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    try:
        if name.endswith(".parquet"):
            yield from _parquet(path)
            return
        with _opened(path) as file:
            if name.endswith((".csv", ".tsv")):
                yield from _csv(file, "\t" if name.endswith(".tsv") else ",")
            elif name.endswith(".json"):
                yield from _json(file)
            else:
                yield from _json_lines(file)
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: is damaged or cut short ({error})") from None
    except OSError as error:
        if error.strerror is None:  # the unpacking of pyarrow
            raise InputError(f"{path}: is damaged or cut short ({error})") from None
        raise InputError(f"task.path: {path} cannot be read: {error.strerror}") from None


def _opened(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if suffix == ".zst":
        return cast(IO[bytes], _pyarrow(path).input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"{path}: to read this format: {INSTALL}") from None
    return pyarrow


def _json_lines(file: IO[bytes]) -> Numbered:
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            yield number, _object(line)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines of a stream, which need not know how to split itself."""
    rest = b""
    while chunk := file.read(_CHUNK_CHARS):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest


def _object(line: bytes) -> Row | BadRow:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return BadRow(f"not JSON: {error}")
    return row if isinstance(row, dict) else BadRow("not a JSON object")


def _json(file: IO[bytes]) -> Numbered:
    """Rows of a JSON list, or of JSON lines in a file that is named otherwise."""
    text = io.TextIOWrapper(io.BufferedReader(_Raw(file)), encoding="utf-8-sig")
    head = _past_blanks(text, "")
    if head.startswith("["):
        yield from _json_list(text, head[1:])
    else:
        yield from _json_objects(text, head)


def _json_list(text: IO[str], rest: str) -> Numbered:
    number = 0
    while True:
        rest = _past_blanks(text, rest)
        if rest.startswith("]"):
            return
        if number and rest:
            rest = _past_blanks(text, rest[1:]) if rest.startswith(",") else f"?{rest}"
        number += 1
        row, rest = _next_object(text, rest)
        yield number, row
        if isinstance(row, BadRow):
            return


def _json_objects(text: IO[str], rest: str) -> Numbered:
    number = 0
    while rest := _past_blanks(text, rest):
        number += 1
        row, rest = _next_object(text, rest)
        yield number, row
        if isinstance(row, BadRow):
            return


def _past_blanks(text: IO[str], rest: str) -> str:
    """The text from the next sign that is not blank on; empty at the end of the file."""
    while not (rest := rest.lstrip()):
        if not (rest := text.read(_CHUNK_CHARS)):
            return ""
    return rest


def _not_a_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_not_a_number)


def _next_object(text: IO[str], rest: str) -> tuple[Row | BadRow, str]:
    """The object at the beginning of `rest`, and what follows it. Reads on while it is not whole."""
    if not rest.startswith("{"):
        return BadRow("not a JSON object" if rest else "not JSON: the file ends in the middle of its list"), ""
    while True:
        try:
            row, end = _DECODER.raw_decode(rest)
            return row, rest[end:]
        except RecursionError:
            return BadRow("not JSON: too deep"), ""
        except ValueError as error:
            more = text.read(max(_CHUNK_CHARS, len(rest))) if len(rest) < _MAX_ROW_CHARS else ""
            if not more:
                return BadRow(f"not JSON: {error}"), ""
            rest += more


class _Raw(io.RawIOBase):
    """A stream that text can be read from, around one that only knows `read`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _csv(file: IO[bytes], delimiter: str) -> Numbered:
    """Rows by the names in the first line. Every value is text."""
    with suppress(OverflowError):
        csv.field_size_limit(1 << 30)
    text = io.TextIOWrapper(io.BufferedReader(_Raw(file)), encoding="utf-8-sig", newline="")
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        if len(set(names)) != len(names):
            yield 1, BadRow("the first line names a column twice")
            return
        for values in rows:
            if values and len(values) != len(names):
                yield rows.line_num, BadRow(f"has {len(values)} values, and the first line names {len(names)} columns")
                return
            if values:
                yield rows.line_num, dict(zip(names, values, strict=True))
    except csv.Error as error:
        yield rows.line_num, BadRow(f"not CSV: {error}")


def _parquet(path: Path) -> Numbered:
    """Rows of one batch after the other; a row group is never held as a whole."""
    pyarrow, number = _pyarrow(path), 0
    from pyarrow.parquet import ParquetFile

    try:
        with path.open("rb") as file, ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        told = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: not a Parquet file that can be read ({told})") from None


def field_of(row: Row, field: str) -> Any:
    """The value of a column, or, by `column.key`, one inside of it. Raises KeyError if there is none."""
    if field in row or "." not in field:
        return row[field]
    column, _, rest = field.partition(".")
    inside = row[column]
    if not isinstance(inside, Mapping):
        raise KeyError(field)
    return field_of(inside, rest)


def has_field(row: Row, field: str) -> bool:
    try:
        field_of(row, field)
    except KeyError:
        return False
    return True


def text_field(row: Row, field: str, setting: str = "") -> str:
    """Return a field that holds a text, or a number as text. `setting` is the one that names the field, if one does."""
    try:
        value = field_of(row, field)
    except KeyError:
        told = f"; {setting} names the one that is meant" if setting else ""
        raise BadRow(f"no field '{field}'; there are: {', '.join(map(repr, row)) or 'none'}{told}") from None
    return as_text(value, field)


def as_text(value: Any, field: str) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise BadRow(f"'{field}' must be text or a number, is {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"'{field}' is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"'{field}' holds half of a character (a lone surrogate)") from None
    return value
