r"""Units: what may follow a number without changing it, such as a percent sign, degrees, or what is counted or measured.
Also the words that change a number or deny it: a number with one of them is not read at all.

    unit  = % | \% | ° [C | F] | [blank] symbol | blank word {blank word} | \text{ word ... } , each maybe ^2 or ²

A percent sign is a unit like any other: 50% is 50, and is not 0.5.
"""

from __future__ import annotations

import re

_MAX_UNIT = 60
_MAX_WORDS = 5


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands million "
    "millions billion billions trillion trillions quadrillion dozen dozens score half halves third thirds fourths fifths "
    "sixths sevenths eighths ninths tenths hundredths thousandths millionths k"
)
_OPERATORS = words(
    "plus minus negative times squared cubed divided multiplied factorial mod modulo power root below by over double twice "
    "triple thrice point"
)
_ALTERNATIVES = words("or and to through thru nor versus vs either between maybe perhaps possibly probably")
NEGATIONS = words(
    "not no never neither isn't isnt wasn't wasnt aren't arent cannot can't cant doesn't doesnt don't dont won't wont wrong "
    "incorrect false except without unlike"
)
CHANGING = _NUMBER_WORDS | _OPERATORS | _ALTERNATIVES | NEGATIONS

SYMBOLS = words(
    "km m dm cm mm ft in yd mi kg g mg lb lbs oz h hr hrs min mins s sec secs ms l ml dl mph kph kmh km/h m/s ft/s mi/h usd "
    "eur gbp cents ¢ am pm a.m p.m hz khz j kj w kw v n pa rad deg sq cu"
)
_KNOWN = words(
    "unit units cm km mm kg ft feet foot inch inches meter meters metre metres mile miles yard yards degree degrees hour "
    "hours minute minutes second seconds day days week weeks month months year years dollar dollars cent cents pound pounds "
    "gram grams liter liters litre litres gallon gallons square cubic sq cu mph kph percent"
)
_POWER = r"(?:\^\{?[23]\}?|[²³])?"
_UNIT = re.compile(
    r"(?:[ \t~]|\\[,;:! ]){0,4}(?:"
    r"(?P<plain>\\?%|(?:\^\{?\\circ\}?|\^?°|\\degree)(?:[ ~]?(?:C|F|\\text\{ ?[CF]\}|\\mathrm\{[CF]\}))?)"
    r"|\\(?:text|mathrm|textnormal|textrm|textbf|mbox)\{(?P<text>[^{}\\]{1,60})\}"
    + _POWER
    + r"|(?P<words>[^{}\\]{1,60}?)"
    + _POWER
    + r")"
    r"(?:[ .]|\\[,;:! ]){0,4}"
)
_WORD = re.compile(r"[A-Za-z¢][A-Za-z'./-]{0,30}")
_NAME = re.compile(
    r"\s{0,4}\\?[A-Za-z](?:[A-Za-z ]|_\{?[A-Za-z0-9]{1,8}\}?|'|\\[a-z]{1,12} ?){0,40}(?:\([A-Za-z0-9, ]{1,20}\))?\s{0,4}"
)


def is_unit(text: str, *, symbols: bool = True) -> bool:
    """Whether this may follow a number: nothing, or a unit. With `symbols`, a single letter may be a unit."""
    if not text.strip():
        return True
    found = _UNIT.fullmatch(text) if len(text) <= _MAX_UNIT else None
    if not found:
        return False
    if found["plain"]:
        return True
    said = found["text"] or found["words"]
    words = said.replace("^2", " ").replace("^3", " ").split()
    if not words or len(words) > _MAX_WORDS or not all(map(_WORD.fullmatch, words)):
        return False
    parts = [part for word in words for part in re.split(r"[/-]", word.lower().strip("."))]
    if CHANGING & set(parts):
        return False
    attached = found["words"] is not None and not text[0].isspace() and text[0] not in "\\~"
    named = words[:1] + [word for word in words[1:] if word not in ("a", "an")]
    return all(_is_word(word.strip("."), symbols or found["text"] is not None, attached) for word in named)


def _is_word(word: str, symbols: bool, attached: bool) -> bool:
    if word.lower() in SYMBOLS:
        return symbols or len(word) > 1
    return not attached and len(word.partition("/")[0]) > 1


def is_name(text: str) -> bool:
    """Whether it is a variable or a name for the number: x, f(2), \\angle ABC, Total cost."""
    return bool(_NAME.fullmatch(text)) and not CHANGING & set(text.lower().split())


def is_known_unit(text: str) -> bool:
    """Whether these words are always units, even after an expression."""
    words = text.lower().replace(".", " ").split()
    return bool(words) and _KNOWN.issuperset(words)
