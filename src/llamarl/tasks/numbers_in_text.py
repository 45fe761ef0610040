"""Finds the last number in running text, either all of it or nothing.

A number includes its sign, fraction, power and multiplier. If the last number is part of something larger (a sum, a range, a
time, an index), one of several alternatives, denied or in a question, there is no answer; no earlier number is taken instead.
Digits inside a word, as in H2O, are not a number.
"""

from __future__ import annotations

import re

from llamarl.tasks.numbers import NUMBER, tidy, value_of
from llamarl.tasks.units import CHANGING, NEGATIONS, SYMBOLS, words

_CONTEXT_CHARS = 100
_BLANKS = " \t~"
_DIGITS = re.compile("[0-9]")
_CLAUSE_END = re.compile(r"[.;:!?\n,](?:\s|\Z)|[\n(]")
_WORD = re.compile(r"[A-Za-z][A-Za-z']{0,30}")
_FILLERS = r"(?:[\s,$*]|\\[,;:! ]){0,6}"
_JOINED = re.compile(rf"[0-9½%][A-Za-z .%$]{{0,30}}\b(?:and|to|through|versus|vs){_FILLERS}\Z")
_OPERATOR = re.compile(
    r"(?:[+/^_×÷·≤≥≠±]|\s[<>]=?|!=|\\(?:times|cdot|div|pm|mp|ne|neq|le|ge|leq|geq|sqrt|log|pmod|bmod|over)|\bmod"  # noqa: RUF001
    r"|[0-9)]\s{0,3}x|[0-9]\s{1,3}:|[\w)}\]]\*{1,2}|[0-9)}\]]\s{1,3}\*{1,2}\s)[\s{(\[$]{0,6}\Z"
)
_ARGUMENT = re.compile(
    r"(?:[\w\\]\(|\\(?!(?:text|textbf|mathbf|mathrm|boxed|fbox|mbox)\{)[a-zA-Z]{1,20}\{|[_^]\{)\s{0,3}\Z"
)
_PART_BEFORE = re.compile(
    r"(?:[0-9][.,:]?|[0-9](?:[ \t~]|\\[,;:! ]){1,3}|[^\W0-9A-Za-z_]|[^\x00-\x7f]\Z(?<=\w)|[)\]}])\Z"
)
_MINUS_BETWEEN = re.compile(r"(?:[0-9)\]}%]|\b[A-Za-z])\s{0,3}\Z")
_PART_AFTER = re.compile(
    r"[0-9_]|[.,:/][0-9]|\^(?!\{?\\circ)|\s{0,3}[+*/^×÷·±](?=\s{0,3}[\w\\(])(?!\*)|\s{0,3}\\(?:times|cdot|div|pm|sqrt|pi|frac)"  # noqa: RUF001
    r"|/[A-Za-z](?![A-Za-z])|[^\W0-9A-Za-z_]|\(|\{|!\w|\s{0,3}-\s{0,3}[0-9]"
)
_LETTERS_AFTER = re.compile(r"[A-Za-z]{1,12}")
_ATTACHED = SYMBOLS | words("c f th")  # as in 5C, 5th
_SCALED = words("twice thrice double triple half times plus than over root")
_PARTS = words("half third thirds quarter quarters fourth fifth percent root square cube multiple fraction")
_ALTERNATIVES = words("or nor either maybe perhaps possibly probably between")
_AFTER = (CHANGING - {"and", "to", "by", "over", "point", "no", "one", "without", "between", "through"}) | {"choose"}
_SOON_AFTER = words("or nor below squared cubed")
_LATER = NEGATIONS - words("no without except")
_AND_PART = re.compile(
    r"\s{1,3}and\s{1,3}(?:(?:a|an|one|two|three)\s{1,3})?(?:half|third|quarter|fourth|fifth|[a-z]{1,12}ths)\b"
)
_TO_NUMBER = re.compile(r"\s{1,3}(?:to|and|by)\s{1,3}([a-z]{2,12})\b")


def last_number(text: str) -> tuple[int, str] | None:
    """Return the end of the last number and its text without currency and unit, or None."""
    tail = tidy(text)
    last = None
    for found in NUMBER.finditer(tail):
        if not _is_in_word(tail, found):
            last = found
    if last is None or value_of(last) is None or _is_denied(tail, last):
        return None
    sign = "-" if (last["sign"] or last["inner_sign"] or "+").lower() not in "+" else ""
    return last.end(), sign + last["magnitude"].strip()


def _start(found: re.Match[str]) -> int:
    """Return the start of the matched number without the blanks before it."""
    return found.start() + len(found.group()) - len(found.group().lstrip(_BLANKS))


def _is_in_word(tail: str, found: re.Match[str]) -> bool:
    start = _start(found)
    if not any(char.isdigit() for char in found["magnitude"]):
        return True
    before = tail[start - 1 : start]
    return (
        before.isascii()
        and before.isalpha()
        and not (start > 1 and tail[start - 2] == "\\")
        and tail[start] not in "\\-+$"
    )


def _is_denied(tail: str, found: re.Match[str]) -> bool:
    start, end = _start(found), found.end()
    before, after = tail[max(0, start - _CONTEXT_CHARS) : start], tail[end : end + _CONTEXT_CHARS]
    return _is_part(before, after, found) or _is_doubted_before(before) or _is_doubted_after(after)


def _is_part(before: str, after: str, found: re.Match[str]) -> bool:
    """Whether it is part of something larger, like 5 in 3+5, 2^5, 5:30, x_5, f(5), 5\\pi."""
    if (found["sign"] or "") in ("-", "+") and found["sign"] and _MINUS_BETWEEN.search(before):
        return True
    if any(pattern.search(before) for pattern in (_OPERATOR, _ARGUMENT, _PART_BEFORE)) or _PART_AFTER.match(after):
        return True
    letters = _LETTERS_AFTER.match(after)
    return bool(letters) and letters.group().lower() not in _ATTACHED if letters else False


def _is_doubted_before(before: str) -> bool:
    if _JOINED.search(before):
        return True
    clause = _CLAUSE_END.split(before)[-1]
    said = [word.lower() for word in _WORD.findall(_DIGITS.split(clause)[-1])]
    if not said:
        return False
    of_part = said[-1] == "of" and bool(_PARTS & set(said[-3:-1]) or "%" in clause[-6:])
    return bool(NEGATIONS & set(said[-3:]) or _ALTERNATIVES & set(said[-2:])) or said[-1] in _SCALED or of_part


def _is_doubted_after(after: str) -> bool:
    clause = _CLAUSE_END.split(after)[0]
    if "?" in after[: len(clause) + 1] or _AND_PART.match(clause):
        return True
    joined = _TO_NUMBER.match(clause)
    if joined and joined[1] in CHANGING:
        return True
    said = [word.lower() for word in _WORD.findall(clause)[:5]]
    return bool(set(said[:1]) & _AFTER or set(said[:3]) & _SOON_AFTER or set(said) & _LATER)
