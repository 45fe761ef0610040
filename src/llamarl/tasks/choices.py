r"""Multiple choice: finds the one letter, A to J, that a completion commits to.

The clearest sign counts: a boxed letter, else one called the answer, else a line that begins like a list item (`B) Paris`),
else the only letter of the last line. Signs of the same kind must agree. Denials, guesses and questions do not count. The
text and all patterns are bounded, so no completion can make this slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llamarl.tasks.think_tags import without_thought

_TAIL_CHARS = 4000
_MAX_CLAUSE = 120
_OPEN = r"(?:[\s*_({\[$\"'`]|\\(?:boxed|text|textbf|mathrm|mathbf)\s?\{|\\[(\[]){0,12}"
_CLOSE = r"(?:[*_)}\]$\"'`]|\\[)\]]){0,12}"
_EDGE = r"(?![A-Za-z0-9_'])"
_FILLER = (
    r"(?:(?:definitely|clearly|certainly|obviously|therefore|thus|then|simply|indeed|option|choice|letter)\s{1,3}){0,2}"
)

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{([^{}]{0,80}(?:\{[^{}]{0,80}\}[^{}]{0,80}){0,2})\}")
_SAID = re.compile(
    r"\b(?:answer(?:\s{1,3}(?:is|was|would be|must be|has to be))?|(?:choice|option)(?:\s{1,3}(?:is|must be)|\s{0,3}[:=])"
    rf"|(?:choose|pick|select))[\s:=*_]{{0,8}}{_FILLER}({_OPEN})([A-J])({_CLOSE}){_EDGE}",
    re.IGNORECASE,
)
_HEAD = re.compile(
    rf"^\s{{0,8}}(?:[-*+>]\s)?({_OPEN})([A-Ja-j])({_CLOSE})\s{{0,2}}(?:$|[.:,;-](?=\s|$)|(?<=[)\]*])(?=\s))"
)
_WHOLE = re.compile(
    rf"\s{{0,8}}{_OPEN}([A-Ja-j]){_CLOSE}\s{{0,2}}(?:$|[.:,;)-]{{1,2}}(?=\s|[}}$*]|$).{{0,300}})", re.DOTALL
)
_LETTER = re.compile(r"(?<![A-Za-z0-9_'\\])([(*\[]{0,4})([A-J])(?![A-Za-z0-9_'])([)*\]]{0,4})")
_ANOTHER = re.compile(
    r"(?:^\s{0,3}|[.,;:/|&]\s{0,3}|\b(?i:or|and|nor)\s{1,3})"
    r"(?:(?i:or|and|maybe|perhaps|possibly|even|also)\s{1,3}){0,3}"
    r"[*(\[]{0,4}(?:[A-J][*)\]]{0,4}(?=\s{0,3}(?:[.,;:/|&()\[*?!]|$)|\s{1,3}[A-J]\b)"
    r"|(?<=[\s(*\[])[a-j][*)\]]{0,4}(?=\s{0,3}(?:[.,;:?!](?:\s|$)|$)))"
)
_DENIED_LETTER = re.compile(
    r"(?i:\b(?:not|neither|nor|except|unlike|rather than|instead of|isn't|cannot be|can't be))\s{1,3}"
    r"(?:(?i:option|choice|answer)\s{1,3})?[(*\[]{0,4}[A-J][)*\]]{0,4}(?![A-Za-z0-9])"
)
_DOUBT = re.compile(
    r"\b(?:not|never|no|neither|nor|cannot|\w{2,8}n't|dont|wrong|incorrect|false|doubt|unsure|uncertain|if|whether|either|"
    r"maybe|perhaps|possibly|probably|might|may|could|guess|none|all but|both|unless|except|suppose|assume)\b|\?",
    re.IGNORECASE,
)
_WORD = re.compile(r"\s{1,4}[A-Za-z]")
_CLAUSE = re.compile(r"[.!?;,:\n]|\b(?:so|therefore|thus|hence|but|then)\b", re.IGNORECASE)
_PLAIN = str.maketrans(
    "\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--"
)  # curly quotes and long dashes become plain ones
_SENTENCE_END = re.compile(r"[.!?\n]")


def choice(completion: str, answer: str, prompt: str) -> float:
    """Return 1 if the completion commits to the answer's letter and to no other, else 0."""
    return float(chosen_letter(completion) == answer.strip().strip("().").upper())


def chosen_letter(text: str) -> str | None:
    """Return the one letter that a completion commits to, or None if there is none or several."""
    tail = without_thought(text)[-_TAIL_CHARS:].translate(_PLAIN)
    for find in (_in_boxes, _called_the_answer, _heading_lines):
        found = set(find(tail))
        if found:
            return found.pop() if len(found) == 1 else None
    return _only_letter(tail.rstrip().rpartition("\n")[2])


def _in_boxes(text: str) -> Iterator[str | None]:
    boxes = _BOX.findall(text)
    if len(boxes) < text.count("\\boxed{"):
        yield None  # a box that is never closed, or holds more than a letter and a few words
    for inside in boxes:
        whole = _WHOLE.fullmatch(inside)
        several = whole is None or _ANOTHER.search(inside[whole.end(1) :])
        yield None if whole is None or several else whole.group(1).upper()


def _called_the_answer(text: str) -> Iterator[str | None]:
    """Yield the letter of every "the answer is B" that is not denied, asked or only supposed."""
    for said in _SAID.finditer(text):
        rest = text[said.end() : said.end() + _MAX_CLAUSE].partition("\n")[0]
        marked = bool(said.group(1).strip() or said.group(3))
        if not _is_a_letter(said.group(2), rest, marked=marked):
            continue
        sentence = _SENTENCE_END.split(rest, maxsplit=1)[0]
        before = _CLAUSE.split(text[max(0, said.start() - _MAX_CLAUSE) : said.start()])[-1]
        asked = rest[len(sentence) :].startswith("?")
        if _DOUBT.search(before) or asked or _is_denied(sentence):
            continue
        yield None if _ANOTHER.search(rest) else said.group(2).upper()


def _is_denied(rest: str) -> bool:
    """Whether "... is wrong" follows."""
    follows = re.match(r"\s{0,3}(?:is|was|seems|looks|would be|can|could)\b", rest)
    return bool(follows and _DOUBT.search(_CLAUSE.split(rest, maxsplit=1)[0]))


def _heading_lines(text: str) -> Iterator[str | None]:
    """Yield the letter of every line that begins with a letter alone or before a stop: `B`, `(b) Paris`, `B. I am sure.`"""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            yield None if _ANOTHER.search(line[head.end(3) :]) else head.group(2).upper()


def _only_letter(line: str) -> str | None:
    """Return the only letter of a line, apart from denied ones. A line with a guess or a question has none."""
    rest = _DENIED_LETTER.sub(" ", line[-_TAIL_CHARS:])
    if _DOUBT.search(rest):
        return None
    found = {
        found.group(2)
        for found in _LETTER.finditer(rest)
        if _is_a_letter(found.group(2), rest[found.end() :], marked=bool(found.group(1) or found.group(3)))
        and not _is_an_article(rest, found)
    }
    return found.pop() if len(found) == 1 else None


def _is_a_letter(letter: str, rest: str, *, marked: bool) -> bool:
    """Whether it is a choice: "a" and "I" before a word are words, unless they are `marked` by brackets or bold type."""
    return marked or not (letter.islower() or letter == "I") or not _WORD.match(rest)


def _is_an_article(line: str, found: re.Match[str]) -> bool:
    """Whether it is the article "A" at the beginning of a sentence."""
    begins = line[: found.start()].rstrip()[-1:] in ("", ".", "!", "?", ":")
    return found.group() == "A" and begins and bool(_WORD.match(line, found.end()))
