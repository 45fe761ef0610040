r"""Finds the final answer of a completion: in \boxed{}, after ####, in its last formula, or as its last number.

All functions look at a bounded part of the text and pass over it a fixed number of times, so no completion makes them slow.
"""

from __future__ import annotations

import re

from llamarl.tasks import numbers_in_text
from llamarl.tasks.numbers import tidy

_TAIL_CHARS = 4000  # a final answer is near the end of the text
_MAX_BOXES = 8
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_BARE_BOX = re.compile(
    r"\\boxed(?:(?:\s{1,4}(?=[A-Za-z])|\s{0,4}(?=[0-9.+-]))([A-Za-z0-9.,+-]{1,40})"
    r"|\s{0,4}(\\[a-zA-Z]{1,20}(?:\{[^{}]{0,40}\}|[0-9]){0,2}))"
)
_JOINT = re.compile(r"(?:[\s,.;$]|\\[()\[\]]|\\q?quad|\\text\{[^{}]{0,40}\}|and|or){0,60}")
_MAX_JOINT = 80
_MAX_BARE = 200
_COMMAND = re.compile(r"\\[a-zA-Z]{1,30}")
_WORD = re.compile(r"[A-Za-z]{3}")


def final_answer(text: str, source: str, *, formulas: bool = False) -> str | None:
    """Return the answer by the rule `reward.answer_from`, or None if there is none. With `auto`, the clearest sign wins."""
    if source == "whole":
        return text.strip()
    if source == "boxed":
        return boxed(text)
    if source == "hashes":
        return after_hashes(text)
    if source == "last_number":
        return last_number(text)
    for find in (boxed, after_hashes, bare_formula, last_formula_or_number) if formulas else (boxed, after_hashes):
        if (found := find(text)) is not None:
            return found
    return None if formulas else last_number(text)


def gold_answer(text: str) -> str:
    """Return the reference answer. A data file may hold it alone, or a worked solution that ends with it."""
    box = boxed(text) if text.count("\\boxed") == 1 else None
    return box or after_hashes(text) or text.strip()


def boxed(text: str) -> str | None:
    r"""Return the content of the last box, or of the last several that belong together, as in \boxed{1} and \boxed{2}.
    A box that is never closed, as in a truncated text, does not count."""
    tail = text[-_TAIL_CHARS:]
    boxes = [(match.start(), match.end()) for match in _BOX.finditer(tail)][-_MAX_BOXES:]
    found: list[str] = []
    next_start = -1
    for start, inside in reversed(boxes):
        content = _braced(tail, inside)
        if content is None:
            continue
        end = inside + len(content) + 1
        if found and not (next_start - end <= _MAX_JOINT and _JOINT.fullmatch(tail, end, next_start)):
            break
        found.append(content.strip())
        next_start = start
    if not found and (bare := _BARE_BOX.findall(tail)):
        return "".join(bare[-1]).strip(".,")
    return ", ".join(reversed(found)) if found else None


def _braced(text: str, start: int) -> str | None:
    """Return the text from `start`, just behind an opening brace, up to the brace that closes it."""
    depth, at = 1, start
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1  # skips \{ and \}, which are not braces
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start:at]
        at += 1
    return None


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last ####, as in GSM8K's solutions."""
    tail = text[-_TAIL_CHARS:]
    _, found, rest = tail.rpartition("####")
    line = rest.strip().partition("\n")[0].strip()
    return line if found and line else None


def bare_formula(text: str) -> str | None:
    """Return the whole text if it is short and has no words in it."""
    whole = text.strip()
    if not whole or len(whole) > _MAX_BARE or "$" in whole or _WORD.search(_COMMAND.sub("", whole)):
        return None
    return whole


def last_formula_or_number(text: str) -> str | None:
    """Return the last formula or the last number, whichever comes later."""
    tail = tidy(text[-_TAIL_CHARS:])
    formula, number = _last_formula(tail), numbers_in_text.last_number(tail)
    if formula and number:
        return formula[1] if formula[0] >= number[0] else number[1]
    found = formula or number
    return found[1] if found else None


def _last_formula(tail: str) -> tuple[int, str] | None:
    r"""Return the end and the content of the last $...$, $$...$$, \(...\) or \[...\]."""
    end, opening = max((tail.rfind(close), open_) for open_, close in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")))
    if end < 0:
        return None
    closed = end
    start = tail.rfind(opening, 0, end)
    if opening == "$" and 0 < start == end - 1:  # a closing $$, whose opening is $$ too
        end, start = start, tail.rfind(opening, 0, start)
    content = tail[start + len(opening) : end].strip() if start >= 0 else ""
    return (closed, content) if content else None


def last_number(text: str) -> str | None:
    """Return the last number with its sign, or None if it is part of something larger, or denied."""
    found = numbers_in_text.last_number(text[-_TAIL_CHARS:])
    return found[1] if found else None
