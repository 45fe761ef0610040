"""Data files in JSON lines. Each line is checked; an error names the line number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from llamarl.errors import ConfigError, InputError

Row = Mapping[str, Any]
T = TypeVar("T")


class BadRow(Exception):
    """A row cannot be used; the message says why."""


def read_rows(path: Path, convert: Callable[[Row], T | None]) -> list[T]:
    """Return convert(row) for each row, leaving out rows for which it is None."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"task.path: {path} cannot be read: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                item = convert(_object(line))
            except BadRow as error:
                raise InputError(f"{path}:{number}: {error}") from None
            except ConfigError as error:
                raise ConfigError(f"{error} ({path}:{number})") from None
            if item is not None:
                found.append(item)
    if not found:
        raise InputError(f"{path}: no rows")
    return found


def _object(line: bytes) -> Row:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRow(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    return row


def text_field(row: Row, field: str) -> str:
    """Return a field that holds a text, or a number as text."""
    if field not in row:
        raise BadRow(f"no field '{field}'; there are: {', '.join(map(repr, row)) or 'none'}")
    return as_text(row[field], field)


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
