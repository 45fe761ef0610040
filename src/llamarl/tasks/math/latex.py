r"""Normalizes LaTeX before it is compared or parsed.

`canonical` is for comparing texts. `plain_latex` is for the parser in the worker: Unicode signs become commands, numbers get
one notation, and units, percent signs and doubled brackets are removed.
"""

from __future__ import annotations

import re
from fractions import Fraction

from llamarl.tasks.numbers import GAP, Number, read_number, tidy
from llamarl.tasks.units import is_known_unit, is_unit

_MAX_CHARS = 2000
_MAX_ROOTS = 20
_COMMANDS = {
    **{"×": "\\times ", "÷": "\\div ", "·": "\\cdot ", "±": "\\pm ", "∓": "\\mp ", "≤": "\\le ", "≥": "\\ge "},  # noqa: RUF001
    **{"≠": "\\ne ", "≈": "\\approx ", "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∉": "\\notin "},  # noqa: RUF001
    **{"⊂": "\\subset ", "⊆": "\\subseteq ", "∅": "\\emptyset ", "π": "\\pi ", "θ": "\\theta ", "α": "\\alpha "},  # noqa: RUF001
    **{
        "β": "\\beta ",
        "γ": "\\gamma ",  # noqa: RUF001
        "δ": "\\delta ",
        "λ": "\\lambda ",
        "μ": "\\mu ",
        "φ": "\\phi ",
        "ω": "\\omega ",
    },
    **{"°": "^\\circ ", "∠": "\\angle ", "△": "\\triangle ", "→": "\\to "},
}
_TO_COMMANDS = str.maketrans(_COMMANDS)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,20}")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]{1,20}")
_ROOT = re.compile(r"(?P<kind>[√∛])\s{0,3}(?:(?P<digits>[0-9]{1,60}(?:\.[0-9]{1,60})?|[A-Za-z])|(?P<open>\())")

_CANONICAL = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(rf"(?<=[0-9]){GAP}{{1,20}}(?=[0-9])"), "#"),  # 1 2 is not 12
    (re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|[\s~$]"), ""),
    (re.compile(r"\\(?:text|mathrm|textnormal)\{([^{}\\]{0,100})\}"), r"\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\{?\\circ\}?|\\degree"), "°"),
    (re.compile(r"_\{([0-9]{1,3})\}"), r"_\1"),
    (re.compile(r"(?<=[0-9])_10(?![0-9])"), ""),  # base ten is the default
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
)
_PLAIN = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])(?!\s{0,3}[.\\])"), ""),
    (
        re.compile(
            r"(?<=[0-9}])\s{0,3}(?:\\?%|\\text\{ ?(?:percent(?:age)?|pct)\}|(?:percent(?:age)?|pct)\b)"
            r"(?=\s{0,3}(?:[,;$)}=.\]]|\Z))"
        ),
        "",
    ),
    (re.compile(r"(?<=[0-9])(?:,\\! ?|\\!,|\{,\})(?=[0-9]{3})"), ","),
    (
        re.compile(rf"(?<![0-9./])([0-9]{{1,60}}){GAP}{{1,4}}([0-9]{{1,60}})/([0-9]{{1,60}})(?![0-9./])"),
        r"\1\\frac{\2}{\3}",
    ),
    (
        re.compile(r"(?<![0-9A-Za-z._\\])([0-9]{1,60}(?:\.[0-9]{1,60})?)[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z.^])"),
        r"(\1\\cdot10^{\2})",
    ),
    (re.compile(r"(?<=[0-9])_\{?10\}?(?![0-9])"), ""),
)
_SPACED = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:[ ~]|\\[,!])[0-9]{3}){1,12}(?![0-9])")
_REPEATING = re.compile(r"(?<![0-9.])[0-9]{0,30}\.[0-9]{0,30}\\overline\{[0-9]{1,20}\}")
_UNIT = re.compile(
    rf"(?<=[^\s,;]){GAP}{{0,4}}\\(?:text|mathrm|textnormal|textrm|textbf|mbox)\{{[^{{}}\\]{{1,60}}\}}(?:\^\{{?[23]\}}?)?\s{{0,3}}\.?\s{{0,3}}(?=\$|\Z)"
)
_BARE_UNIT = re.compile(r"(?<=[0-9})a-z])\s{1,3}([A-Za-z][A-Za-z. ]{1,30})(?:\^\{?[23]\}?)?\s{0,3}(?=\$|\Z)")
_NO_CHAIN = re.compile(r"\\(?:le|ge|lt|gt|ne|in|leq|geq|neq)(?![a-zA-Z])|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])")
_PAIRS = {"(": ")", "{": "}"}


def canonical(text: str) -> str:
    """Return a form for comparing: texts with the same form mean the same."""
    found = tidy(text[:_MAX_CHARS])
    for pattern, replacement in _CANONICAL:
        found = pattern.sub(replacement, found)
    return found.strip(".")


def plain_latex(text: str) -> str:
    """Return LaTeX for the parser. A text that is one number becomes that number."""
    number = read_number(text, symbols=False)
    if number is not None and "=" not in text:  # y = 3 is an equation
        return as_latex(number)
    found = _without_signs(tidy(text))
    found = _SPACED.sub(_glued, _REPEATING.sub(_as_fraction, found))
    for pattern, replacement in _PLAIN:
        found = pattern.sub(replacement, found)
    return without_doubled_brackets(_without_unit(found))


def as_latex(number: Number) -> str:
    value = number.value
    sign = "-" if value < 0 else ""
    if value.denominator == 1 and number.exact:
        return str(value)
    if number.exact:
        return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    digits = str(abs(int(value * 10**places))).zfill(places + 1)
    whole, decimals = digits[: len(digits) - places], digits[len(digits) - places :]
    return f"{sign}{whole}.{decimals or '0'}"


def nesting(text: str) -> int:
    """Return the largest depth of brackets."""
    depth = deepest = 0
    for char in text:
        if char in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "})]":
            depth -= 1
    return deepest


def without_doubled_brackets(text: str) -> str:
    """Remove each pair of brackets that holds nothing but a pair of the same kind: ((x)) becomes (x)."""
    opened: list[tuple[str, int]] = []
    closes: dict[int, int] = {}
    for at, char in enumerate(text):
        if char in "({" and text[at - 1 : at] != "\\":
            opened.append((char, at))
        elif char in ")}" and text[at - 1 : at] != "\\":
            if not opened or _PAIRS[opened[-1][0]] != char:
                return text
            closes[opened.pop()[1]] = at
    doubled = {at for at, end in closes.items() if text[at + 1] == text[at] and closes.get(at + 1) == end - 1}
    gone = doubled | {closes[at] for at in doubled}
    return "".join(char for at, char in enumerate(text) if at not in gone)


def members_of(text: str) -> list[str]:
    """Return the members of a chain of equations: a = b = c has three. A list, a relation or words count as one."""
    depth, start, found = 0, 0, []
    for at, char in enumerate(text):
        if char in "{([":
            depth += 1
        elif char in "})]":
            depth -= 1
        elif depth == 0 and char in ",;<>&":
            return [text]
        elif depth == 0 and char == "=":
            if text[at - 1 : at] in ("!", ":", "\\", "~") or text[at + 1 : at + 2] == "=":
                return [text]
            found.append(text[start:at].strip())
            start = at + 1
    found.append(text[start:].strip())
    return found if all(found) and not _NO_CHAIN.search(text) else [text]


def _without_signs(text: str) -> str:
    """Replace Unicode signs by commands."""
    found = _as_roots(text)
    found = _RAISED.sub(lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", found)
    found = _LOWERED.sub(lambda match: f"_{{{match.group().translate(_SUBSCRIPTS)}}}", found)
    return found.translate(_TO_COMMANDS)


def _as_roots(text: str) -> str:
    """Replace √2 and √(x+1) by commands. A bracket that is never closed extends to the end."""
    parts: list[str] = []
    at = 0
    for found in list(_ROOT.finditer(text))[:_MAX_ROOTS]:
        if found.start() < at:
            continue
        parts.append(text[at : found.start()])
        command = "\\sqrt" if found["kind"] == "√" else "\\sqrt[3]"
        at, inside = found.end(), found["digits"]
        if not inside:
            end = _closing(text, at)
            inside, at = text[at:end], end + 1
        parts.append(f"{command}{{{inside}}}")
    return "".join([*parts, text[at:]])


def _closing(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return len(text)


def _glued(match: re.Match[str]) -> str:
    return "".join(char for char in match.group() if char.isdigit())


def _as_fraction(match: re.Match[str]) -> str:
    number = read_number(match.group())
    value = number.value if number else Fraction(0)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _without_unit(text: str) -> str:
    if (found := _UNIT.search(text)) and is_unit(found.group().rstrip(" .")):
        return text[: found.start()] + text[found.end() :]
    if (found := _BARE_UNIT.search(text)) and is_known_unit(found[1]):
        return text[: found.start()] + text[found.end() :]
    return text
