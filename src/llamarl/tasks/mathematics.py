r"""The math scorer up to the point where algebra begins: find the answer, settle what is plain, pass on the rest.

Equal texts and plain numbers are compared here, exactly. Only what is left goes to a worker, and only after it has been
found to be short, shallow and made of characters that mathematics is written in.
"""

from __future__ import annotations

import re
from fractions import Fraction

from llamarl.tasks.latex import canonical, nesting, without_doubled_brackets
from llamarl.tasks.numbers import Number, read_number, tidy
from llamarl.tasks.units import NEGATIONS

MAX_CHARS = 1000
_MAX_DEPTH = 40
_MAX_PARSED_DEPTH = 8  # of brackets that hold more than a pair of brackets; the answers of MATH go to 3
PLACES = Fraction(1, 2 * 10**6)
DIGITS = Fraction(1, 10**6)
_UNICODE = "×÷·±∓≤≥≠≈∞∪∩∈∉⊂⊆∅√∛πθαβγδλμφω°′″²³⁴⁵⁶⁷⁸⁹⁰¹₀₁₂₃₄₅₆₇₈₉ℝℤℚℕℂ∑∏∫∠△→"  # noqa: RUF001
_FORBIDDEN = re.compile(rf"[^\t\n\r\x20-\x3e\x40-\x7e{_UNICODE}]")  # \x3f, the question mark, is no answer
_INFINITY = re.compile(r"\\inft?y?(?![a-zA-Z])|\\infin|∞|\boo\b|\\inf")
_INFINITE_END = re.compile(
    r"(?:(?:^|[(\[,;=<>≤≥]|\\(?:le|ge|leq|geq|to|in))\s{0,3})[-+]?\s{0,3}(?:\\infty|∞)"
    r"(?=\s{0,3}(?:$|[)\],;=<>]|\\(?:right|cup|cap|le|ge|leq|geq|text)))"
)
_BASED = re.compile(r"-?0{0,200}([0-9A-Z,]{1,200})_([0-9]{1,3})")
_MAX_PARSED_CHARS = 400  # the answers of MATH go to 160
_MAX_BARS = 8
# What no formula holds, and the parser would turn over for long: text in quotes, words, calls, rows of signs.
_NO_FORMULA = re.compile(
    r'"|[A-Za-z]{20}|[-+]{4}|(?:^|[=,(\[{])\s{0,3}[-+]\s{0,3}[-+]|(?<![\\A-Za-z{])(?!arc|sin|cos|tan|cot|sec|csc|log|exp|sqrt|max|min)[A-Za-z_]{4,19}\('
)
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|textnormal|operatorname)\{[^{}]{0,200}\}|\\[a-zA-Z]{1,30}")
_WORD = re.compile(r"(?<![a-z\\])[a-z']{2,20}")
_DENYING = NEGATIONS | {"squared", "cubed", "plus", "minus", "times", "below", "maybe", "perhaps", "between", "either"}
# What the parser works out while it reads, however large the arguments are.
_WORKED_OUT = re.compile(r"gcd|lcm|eye|zeros|ones|diag|hstack|vstack|rank|rref|[Gg]amma\s{0,3}(?:\\left)?[({]")


def quick_verdict(given: str, gold: str) -> float | None:
    """1 or 0 where no algebra is needed; None where it is."""
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
    """Whether a decimal stands for the other number: they agree in six places and in six digits."""
    apart = abs(one - other)
    return apart <= PLACES and apart <= DIGITS * max(abs(one), abs(other))


def _same(one: Number, other: Number) -> bool:
    return one.value == other.value if one.exact and other.exact else is_close(one.value, other.value)


def _based(text: str) -> tuple[str, ...] | None:
    """The digits and the base of a numeral such as 1010_2, which is no plain number."""
    found = _BASED.fullmatch(text)
    return (text[:1] if text[:1] == "-" else "", *found.groups()) if found else None


def is_readable(text: str) -> bool:
    """No control, bidirectional, full-width or other odd characters, no tower of brackets, and infinity only where an
    interval or a bound ends: calculating with it gives whatever one likes."""
    plain = tidy(text)
    if _FORBIDDEN.search(plain) or len(_INFINITY.findall(plain)) != len(_INFINITE_END.findall(plain)):
        return False
    return nesting(plain) <= _MAX_DEPTH


def is_parsable(text: str) -> bool:
    """Whether the parser can be given it: a formula of some length, few brackets in brackets, and nothing in it that the
    parser would work out on the way."""
    if len(text) > _MAX_PARSED_CHARS or text.count("|") > _MAX_BARS or _WORKED_OUT.search(text):
        return False
    if any(map(str.isdigit, text)) and _DENYING & set(_WORD.findall(text.lower())):  # not 0 is no product of letters
        return False
    return (
        not _NO_FORMULA.search(_TEXT.sub("", tidy(text)))
        and nesting(without_doubled_brackets(text)) <= _MAX_PARSED_DEPTH
    )
