r"""The grammar of numbers for all scorers: sign, digits, fractions, powers of ten, and what may surround them.

    answer     = {name "="} number {"=" name}          every number of such a chain must have the same value
    number     = [sign] [currency] [sign] magnitude [currency] [unit]         at most one sign
    sign       = "-" | "+" | "minus" | "negative"      − (U+2212), – (U+2013) and － (U+FF0D) are "-"
    magnitude  = mixed | fraction | decimal [power] [multiplier]
    mixed      = integer (\frac{a}{b} | " " a/b | ½)   of a proper fraction: a < b
    fraction   = \frac{a}{b} | \frac12 | a/b | ½
    decimal    = integer [. digits] [\overline{digits}] | . digits
    integer    = digits, or groups of three parted by , {,} \, \! or one space
    power      = e3 | E-3 | \times 10^{3} | x 10^3
    multiplier = hundred | thousand | million | billion | trillion | dozen

Units, including percent signs, are defined in units.py and are dropped. A text that does not match as a whole is no number;
no part of it is read instead. Every quantifier is bounded, so the time is linear in the text.
"""  # noqa: RUF002

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from llamarl.tasks.units import is_name, is_unit

MAX_CHARS = 200
_MAX_MEMBERS = 6
_MAX_WRAPS = 6

_VULGAR = {
    **{"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"},
    **{"⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8", "⅑": "1/9", "⅒": "1/10"},
}
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–－‐‑", "-"),  # noqa: RUF001
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
        **{sign: "\\frac{{{}}}{{{}}}".format(*ratio.split("/")) for sign, ratio in _VULGAR.items()},
    }
)

GAP = r"(?:[ \t~]|\\[,;:! ])"
_DIGITS = r"[0-9]{1,200}"
_COMMA = r"(?:,\\! ?|\\!,|\{,\}|\\,|\\!|,)"
_INTEGER = rf"(?:[0-9]{{1,3}}(?:{_COMMA}[0-9]{{3}}){{1,20}}(?![0-9])|{_DIGITS})"
_SPACED = r"[0-9]{1,3}(?:[ ~][0-9]{3}){1,20}(?![0-9])"


def _braced(inside: str) -> str:
    return rf"\{{{GAP}{{0,3}}{inside}{GAP}{{0,3}}\}}"


def _fraction(prefix: str) -> str:
    """Return a pattern for a LaTeX fraction; the names of its groups begin with `prefix`."""
    above = rf"(?:{_braced(rf'(?P<{prefix}a>-?{_INTEGER})')}|(?P<{prefix}b>[0-9]))"
    below = rf"(?:{_braced(rf'(?P<{prefix}c>{_INTEGER})')}|(?P<{prefix}d>[0-9]))"
    return rf"\\[dtc]?frac{GAP}{{0,3}}{above}{GAP}{{0,3}}{below}"


def _ratio(prefix: str) -> str:
    return rf"(?P<{prefix}e>{_INTEGER}){GAP}{{0,3}}/{GAP}{{0,3}}(?P<{prefix}f>{_INTEGER})"


_POWER = (
    r"(?:[eE](?P<power>[-+]?[0-9]{1,3})(?![0-9])"
    rf"|{GAP}{{0,3}}(?:\\times|\\cdot|[x×*]){GAP}{{0,3}}10{GAP}{{0,3}}(?:\^|\*\*){GAP}{{0,3}}"  # noqa: RUF001
    r"(?:\{ ?(?P<power_of_ten>[-+]?[0-9]{1,3}) ?\}|(?P<bare_power_of_ten>[-+]?[0-9]{1,3})(?![0-9])))"
)
_MULTIPLIERS = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_MULTIPLIER = rf"(?:{GAP}|\\text\{{ ?){{1,3}}(?P<multiplier>{'|'.join(_MULTIPLIERS)})(?![A-Za-z])\}}?"
_CURRENCY = r"(?:\\\$|[$£€¥₹])"
_SIGN = rf"(?:[-+]|(?:minus|negative)(?={GAP}|\$))"
_MAGNITUDE = (
    rf"(?:(?P<whole>{_INTEGER})(?:{GAP}{{0,3}}{_fraction('m')}|{GAP}{{1,3}}{_ratio('m')})"
    rf"|{_fraction('f')}|{_ratio('f')}"
    rf"|(?P<digits>{_SPACED}|{_INTEGER})?(?P<decimals>\.[0-9]{{0,199}}(?:[0-9]|(?=\\over)))?"
    rf"(?:\\overline\{{(?P<repeated>[0-9]{{1,20}})\}})?{_POWER}?)"
)
NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?{GAP}{{0,3}}(?P<currency>{_CURRENCY}{GAP}{{0,3}})?(?P<inner_sign>[-+])?"
    rf"(?P<magnitude>(?=[0-9.\\]){_MAGNITUDE}(?:{_MULTIPLIER})?)",
    re.IGNORECASE | re.ASCII,
)
_CURRENCY_AFTER = re.compile(rf"{GAP}{{0,3}}{_CURRENCY}")
_END_MARK = re.compile(r"(?:</s>|<\|[a-z_]{1,20}\|>|</answer>)\Z")
_WRAPS = (
    *(("**", "**"), ("*", "*"), ("`", "`"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("(", ")")),
    *((f"\\{command}{{", "}") for command in ("text", "mathrm", "mathbf", "textbf", "textnormal", "mbox", "boxed")),
    ("{", "}"),
)


class Number(NamedTuple):
    value: Fraction
    exact: bool  # whether it is written without a decimal point


def tidy(text: str) -> str:
    """Replace all minus signs and blanks by one kind, and signs such as ½ by fractions."""
    return text.translate(_CHARACTERS)


def read_number(text: str, *, symbols: bool = True) -> Number | None:
    """Return the number if the whole text is one number, else None. Without `symbols`, a single letter is a variable, never
    a unit."""
    if len(text) > MAX_CHARS:
        return None
    members = unwrap(tidy(text)).split("=")
    if len(members) > 1 and not members[0].strip():
        members = members[1:]
    if len(members) > _MAX_MEMBERS:
        return None
    numbers = [_read_member(member, symbols) for member in members if not is_name(member)]
    first = numbers[0] if numbers else None
    return first if first and all(other and other.value == first.value for other in numbers) else None


def value_of(found: re.Match[str]) -> Number | None:
    """Return the value of a match of NUMBER, or None for two signs, no digits, or an impossible fraction."""
    if found["sign"] and found["inner_sign"]:
        return None
    size = _magnitude(found)
    if size is None:
        return None
    negative = (found["sign"] or found["inner_sign"] or "+").lower() not in "+"
    factor = _MULTIPLIERS[found["multiplier"].lower()] if found["multiplier"] else 1
    return Number(-size * factor if negative else size * factor, not found["decimals"] or bool(found["repeated"]))


def unwrap(text: str) -> str:
    """Remove decoration from a text: dollars, brackets, bold type, marks at its end."""
    bare = text.strip()
    for _ in range(_MAX_WRAPS):
        before = bare
        bare = _END_MARK.sub("", bare).strip().removesuffix(".").strip()
        for opening, closing in _WRAPS:
            inside = bare[len(opening) : -len(closing)].strip()
            if bare.startswith(opening) and bare.endswith(closing) and inside and _is_closed(inside, opening):
                bare = inside
                break
        if bare == before:
            break
    return bare


def _is_closed(inside: str, opening: str) -> bool:
    """Whether nothing inside closes the given opening."""
    pair = {"(": "()", "{": "{}"}.get(opening[-1])
    if pair is None or opening == r"\(":
        return opening not in inside and not (opening == r"\(" and r"\)" in inside)
    depth = 0
    for char in inside:
        depth += (char == pair[0]) - (char == pair[1])
        if depth < 0:
            return False
    return depth == 0


def _read_member(text: str, symbols: bool) -> Number | None:
    bare = unwrap(text)
    found = NUMBER.match(bare)
    if not found:
        return None
    end = found.end()
    if after := _CURRENCY_AFTER.match(bare, end):
        end = after.end()
    paid = bool(after or found["currency"])
    return value_of(found) if is_unit(bare[end:], symbols=symbols and not paid) else None


def _magnitude(found: re.Match[str]) -> Fraction | None:
    for prefix in "mf":
        above = found[f"{prefix}a"] or found[f"{prefix}b"] or found[f"{prefix}e"]
        below = found[f"{prefix}c"] or found[f"{prefix}d"] or found[f"{prefix}f"]
        if above:
            part = Fraction(_integer(above), _integer(below)) if _integer(below) else None
            if prefix == "f" or part is None:
                return part
            return _integer(found["whole"]) + part if 0 < part < 1 else None
    return _decimal(found)


def _decimal(found: re.Match[str]) -> Fraction | None:
    decimals, repeated = (found["decimals"] or "")[1:], found["repeated"]
    if (not found["digits"] and not decimals) or (repeated and not found["decimals"]):
        return None
    size = Fraction(_integer((found["digits"] or "0") + decimals), 10 ** len(decimals))
    if repeated:
        size += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(decimals))
    power = found["power"] or found["power_of_ten"] or found["bare_power_of_ten"]
    return size * Fraction(10) ** int(power) if power else size


def _integer(text: str) -> int:
    digits = int("".join(char for char in text if char.isdigit()))
    return -digits if text.startswith("-") else digits
