"""Numbers as people write them, read exactly: signs, thousands, decimals, fractions, currency and percent. Linear time."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

_MAX_CHARS = 200
_DIGITS = r"[0-9]{1,60}"
_GROUPED = r"[0-9]{1,3}(?:(?:,|\{,\}|\\,|\\!,|,\\!| )[0-9]{3}){1,12}"
_PLAIN = re.compile(rf"(?P<sign>[-+]?)(?P<whole>{_GROUPED}|{_DIGITS})?(?P<decimals>\.[0-9]{{0,60}})?")
_RATIO = re.compile(
    rf"(?P<sign>[-+]?)(?:\\[dtc]?frac\{{(?P<a>-?{_DIGITS})\}}\{{(?P<b>{_DIGITS})\}}"
    rf"|\\[dtc]?frac(?P<c>[0-9])(?P<d>[0-9])|(?P<e>{_DIGITS})/(?P<f>{_DIGITS}))"
)
_SPACES = re.compile(r"\\[,;:!]|[\s~]")
_SEPARATORS = re.compile(r"[^0-9]")
_GAP = r"(?:[ ~]|\\[,;:! ])"
_UNIT = re.compile(  # a bare letter is no unit but a variable
    rf"{_GAP}{{0,4}}\\(?:text|mathrm|textnormal)\{{ ?([A-Za-z][A-Za-z .]{{0,39}})\}}$"
    rf"|{_GAP}{{1,4}}([A-Za-z][A-Za-z.][A-Za-z .]{{0,38}})$"
)
_FACTORS = frozenset(("hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "half", "k"))


class Number(NamedTuple):
    value: Fraction
    exact: bool  # written without a decimal point
    percent: bool


def read_number(text: str) -> Number | None:
    """None for everything that is not one plain number or fraction of two."""
    if len(text) > _MAX_CHARS or not text.isascii():
        return None
    bare = text.strip().strip("$").strip().removeprefix("\\$").removesuffix(".")
    percent = bare.endswith("%")
    if percent:
        bare = bare.removesuffix("%").removesuffix("\\")
    bare = bare.strip()
    value = _plain(bare)
    if value is not None:
        return Number(value, "." not in bare, percent)
    value = _ratio(_SPACES.sub("", bare))
    return None if value is None else Number(value, True, percent)


def without_unit(text: str) -> str:
    """A number may be followed by what it counts: 18 dollars, 3\\text{ cm}. Words that change its value stay."""
    found = _UNIT.search(text.strip()) if len(text) <= _MAX_CHARS else None
    if not found or _FACTORS & set((found[1] or found[2]).lower().replace(".", " ").split()):
        return text
    return text.strip()[: found.start()]


def _plain(text: str) -> Fraction | None:
    """The sign may stand before the currency: -$5."""
    found = _PLAIN.fullmatch(text.replace("\\$", "", 1).replace("$", "", 1))
    if not found or not (found["whole"] or len(found["decimals"] or "") > 1):
        return None
    digits = _SEPARATORS.sub("", found["whole"] or "") or "0"
    return Fraction(Decimal(f"{found['sign']}{digits}{found['decimals'] or ''}"))


def _ratio(text: str) -> Fraction | None:
    found = _RATIO.fullmatch(text)
    if not found:
        return None
    above = int(found["a"] or found["c"] or found["e"])
    below = int(found["b"] or found["d"] or found["f"])
    if not below:
        return None
    return Fraction(-above if found["sign"] == "-" else above, below)
