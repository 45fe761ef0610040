"""The math scorer up to the point where algebra begins: find the answer, settle what is plain, pass on the rest.

Equal texts and plain numbers are compared here, exactly. Only what is left goes to a worker, and only after it has been
found to be short, shallow and made of characters that mathematics is written in.
"""

from __future__ import annotations

import re

from llamarl.tasks.numbers import Number, read_number

MAX_CHARS = 1000
_MAX_DEPTH = 40
_SAME_DECIMALS = 6  # as math-verify compares a decimal with anything
_UNICODE = "×÷·±∓−≤≥≠≈∞∪∩∈∉⊂⊆∅√∛πθαβγδλμφω°′″½⅓¼¾⅔²³⁴⁵⁶⁷⁸⁹⁰¹₀₁₂₃₄₅₆₇₈₉ℝℤℚℕℂ∑∏∫∠△→"  # noqa: RUF001
_FORBIDDEN = re.compile(rf"[^\t\n\r\x20-\x7e{_UNICODE}]")
_INFINITY = re.compile(r"\\inft?y?(?![a-zA-Z])|\\infin|∞|\boo\b|\\inf")
_INFINITE_END = re.compile(
    r"(?:(?:^|[(\[,;=<>≤≥]|\\(?:le|ge|leq|geq|to|in))\s{0,3})[-+]?\s{0,3}(?:\\infty|∞)"
    r"(?=\s{0,3}(?:$|[)\],;=<>]|\\(?:right|cup|cap|le|ge|leq|geq|text)))"
)
_SPELLINGS = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"(?<=[0-9])[\s~]{1,100}(?=[0-9])"), "_"),  # 1 2 is not 12
    (re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|[\s~$]"), ""),
    (re.compile(r"\\(?:text|mathrm|textnormal)\{([^{}\\]{0,100})\}"), r"\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\{?\\circ\}?|\\degree"), "°"),
)


def quick_verdict(given: str, gold: str) -> float | None:
    """1 or 0 where no algebra is needed; None where it is."""
    if len(given) > MAX_CHARS or not is_readable(given):
        return 0.0
    mine, theirs = canonical(given), canonical(gold)
    if mine and mine == theirs:
        return 1.0
    one, other = read_number(given), read_number(gold)
    if one is None or other is None or one.percent != other.percent:
        return None
    return float(_same(one, other))


def _same(one: Number, other: Number) -> bool:
    if one.exact and other.exact:
        return one.value == other.value
    return round(one.value, _SAME_DECIMALS) == round(other.value, _SAME_DECIMALS)


def is_readable(text: str) -> bool:
    """No control, bidirectional, full-width or other odd characters, no tower of brackets, and infinity only where an
    interval or a bound ends: calculating with it gives whatever one likes."""
    if _FORBIDDEN.search(text) or len(_INFINITY.findall(text)) != len(_INFINITE_END.findall(text)):
        return False
    depth = 0
    for char in text:
        if char in "{([":
            depth += 1
            if depth > _MAX_DEPTH:
                return False
        elif char in "})]":
            depth -= 1
    return True


def canonical(text: str) -> str:
    """Spellings of the same LaTeX made one."""
    found = text[: 2 * MAX_CHARS]
    for pattern, replacement in _SPELLINGS:
        found = pattern.sub(replacement, found)
    return found.strip(".")
