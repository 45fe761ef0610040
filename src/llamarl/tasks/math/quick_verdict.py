r"""The part of the math scorer that needs no algebra: it decides the plain cases and passes on the rest.

Equal texts and plain numbers are compared here, exactly. The rest goes to a worker, but only if it is short, has few nested
brackets, and consists of characters used in mathematics.
"""

from __future__ import annotations

import re
from fractions import Fraction

from llamarl.tasks.math.latex import canonical, nesting, without_doubled_brackets
from llamarl.tasks.numbers import Number, read_number, tidy
from llamarl.tasks.units import NEGATIONS

MAX_CHARS = 1000
_MAX_DEPTH = 40
_MAX_PARSED_DEPTH = 8  # without doubled brackets; answers of MATH reach 3
PLACES = Fraction(1, 2 * 10**6)
DIGITS = Fraction(1, 10**6)
_UNICODE = "×÷·±∓≤≥≠≈∞∪∩∈∉⊂⊆∅√∛πθαβγδλμφω°′″²³⁴⁵⁶⁷⁸⁹⁰¹₀₁₂₃₄₅₆₇₈₉ℝℤℚℕℂ∑∏∫∠△→"  # noqa: RUF001
_FORBIDDEN = re.compile(rf"[^\t\n\r\x20-\x3e\x40-\x7e{_UNICODE}]")  # and no \x3f, the question mark: it is no answer
_INFINITY = re.compile(r"\\inft?y?(?![a-zA-Z])|\\infin|∞|\boo\b|\\inf")
_INFINITE_END = re.compile(
    r"(?:(?:^|[(\[,;=<>≤≥]|\\(?:le|ge|leq|geq|to|in))\s{0,3})[-+]?\s{0,3}(?:\\infty|∞)"
    r"(?=\s{0,3}(?:$|[)\],;=<>]|\\(?:right|cup|cap|le|ge|leq|geq|text)))"
)
_BASED = re.compile(r"-?0{0,200}([0-9A-Z,]{1,200})_([0-9]{1,3})")
_MAX_PARSED_CHARS = 400  # answers of MATH reach 160
_MAX_BARS = 8
# Not in any formula, but slow to parse: quoted text, long words, function calls, rows of signs.
_NO_FORMULA = re.compile(
    r'"|[A-Za-z]{20}|[-+]{4}|(?:^|[=,(\[{])\s{0,3}[-+]\s{0,3}[-+]|(?<![\\A-Za-z{])(?!arc|sin|cos|tan|cot|sec|csc|log|exp|sqrt|max|min)[A-Za-z_]{4,19}\('
)
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|textnormal|operatorname)\{[^{}]{0,200}\}|\\[a-zA-Z]{1,30}")
_WORD = re.compile(r"(?<![a-z\\])[a-z']{2,20}")
_DENYING = NEGATIONS | {"squared", "cubed", "plus", "minus", "times", "below", "maybe", "perhaps", "between", "either"}
# Functions that the parser evaluates while it reads, however large their arguments are.
_WORKED_OUT = re.compile(r"gcd|lcm|eye|zeros|ones|diag|hstack|vstack|rank|rref|[Gg]amma\s{0,3}(?:\\left)?[({]")


def quick_verdict(given: str, gold: str) -> float | None:
    """Return 1 or 0, or None if the verdict needs algebra."""
    if len(given) > MAX_CHARS or not is_readable(given):
        return 0.0
    mine, theirs = canonical(given), canonical(gold)
    if mine and mine == theirs:
        return 1.0
    one, other = read_number(given), read_number(gold, symbols=False)
    named = "=" in given and "=" in gold  # x = 5 is not y = 5
    if one is not None and other is not None and not named:
        return float(_same(one, other))
    based = _based(mine), _based(theirs)
    if any(based) and all(based[at] or (one, other)[at] is not None for at in (0, 1)):
        return float(based[0] == based[1])
    return None if is_parsable(given) else 0.0


def is_close(one: Fraction, other: Fraction) -> bool:
    """Whether a decimal stands for the other number: both agree to six decimal places and six digits."""
    apart = abs(one - other)
    return apart <= PLACES and apart <= DIGITS * max(abs(one), abs(other))


def _same(one: Number, other: Number) -> bool:
    return one.value == other.value if one.exact and other.exact else is_close(one.value, other.value)


def _based(text: str) -> tuple[str, ...] | None:
    """Return sign, digits and base of a numeral such as 1010_2, or None for other texts."""
    found = _BASED.fullmatch(text)
    return (text[:1] if text[:1] == "-" else "", *found.groups()) if found else None


def is_readable(text: str) -> bool:
    """Whether it has only usual characters (no control, bidirectional or full-width ones), bounded nesting, and infinity
    only as the end of an interval or a bound: arithmetic with infinity can give any result."""
    plain = tidy(text)
    if _FORBIDDEN.search(plain) or len(_INFINITY.findall(plain)) != len(_INFINITE_END.findall(plain)):
        return False
    return nesting(plain) <= _MAX_DEPTH


def is_parsable(text: str) -> bool:
    """Whether it is safe to parse: a formula of bounded length and nesting, without functions that the parser would
    evaluate."""
    if len(text) > _MAX_PARSED_CHARS or text.count("|") > _MAX_BARS or _WORKED_OUT.search(text):
        return False
    if any(map(str.isdigit, text)) and _DENYING & set(_WORD.findall(text.lower())):  # "not 0" is no product of letters
        return False
    return (
        not _NO_FORMULA.search(_TEXT.sub("", tidy(text)))
        and nesting(without_doubled_brackets(text)) <= _MAX_PARSED_DEPTH
    )
