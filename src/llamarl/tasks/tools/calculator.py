"""A calculator: parses an expression and computes it exactly. No text is executed."""

from __future__ import annotations

import re
from decimal import Decimal, localcontext
from fractions import Fraction

_TOKEN = re.compile(r"\s*(?:([0-9]{1,60}(?:\.[0-9]{1,60})?|\.[0-9]{1,60})|(\*\*|[-+*/^()]))")
_LAST = re.compile(r"[-+*/^().0-9\s]{1,400}=?\s*\Z")
_MAX_CHARS = 400
_MAX_DEPTH = 40
_MAX_POWER = 64
_MAX_BITS = 2000
_DIGITS = 12  # significant digits of results that are not whole numbers


class NoExpression(ValueError):
    """The text is not an expression; the message says why."""


def compute(text: str) -> str:
    """Return the value as text. Raises NoExpression."""
    return _written(_Reader(text).value())


def last_expression(text: str) -> str | None:
    """Return the expression at the end of a text if it has an operation: "4+5" for "so 4+5="."""
    found = _LAST.search(text[-_MAX_CHARS:])
    if found is None:
        return None
    expression = found.group().strip().removesuffix("=").strip()
    has_operation = re.search(r"[0-9).]\s*[-+*/^]", expression)
    return expression if has_operation else None


class _Reader:
    """A recursive-descent parser for sums of products of powers. The size of all numbers is bounded."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_CHARS:
            raise NoExpression("too long")
        self._tokens = _cut(text.strip())
        self._at = 0
        self._depth = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._at < len(self._tokens):
            raise NoExpression(f"unexpected '{self._tokens[self._at]}'")
        return value

    def _take(self, *wanted: str) -> str | None:
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return self._tokens[self._at - 1]
        return None

    def _sum(self) -> Fraction:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NoExpression("nested too deeply")
        value = self._product()
        while sign := self._take("+", "-"):
            other = self._product()
            value = _bounded(value + other if sign == "+" else value - other)
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while sign := self._take("*", "/"):
            other = self._signed()
            if sign == "/" and not other:
                raise NoExpression("division by zero")
            value = _bounded(value * other if sign == "*" else value / other)
        return value

    def _signed(self) -> Fraction:
        signs = 0
        while sign := self._take("+", "-"):
            signs += sign == "-"
        value = self._power()
        return -value if signs % 2 else value

    def _power(self) -> Fraction:
        base = self._number()
        if not self._take("**", "^"):
            return base
        exponent = self._signed_number()
        if exponent.denominator != 1 or abs(exponent) > _MAX_POWER:
            raise NoExpression(f"powers are whole numbers up to {_MAX_POWER}")
        if not base and exponent < 0:
            raise NoExpression("division by zero")
        return _bounded(base ** int(exponent))

    def _signed_number(self) -> Fraction:
        return -self._number() if self._take("-") else self._number()

    def _number(self) -> Fraction:
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise NoExpression("a bracket is not closed")
            return value
        if self._at == len(self._tokens):
            raise NoExpression("it ends too early")
        token = self._tokens[self._at]
        if token in "**/^()+-":
            raise NoExpression(f"unexpected '{token}'")
        self._at += 1
        return Fraction(token)


def _cut(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise NoExpression(f"cannot read '{text[at : at + 10]}'")
        tokens.append(found.group(1) or found.group(2))
        at = found.end()
    return tokens


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise NoExpression("the numbers become too large")
    return value


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = _DIGITS
        rounded = Decimal(value.numerator) / Decimal(value.denominator)
    return f"{rounded.normalize():f}" if abs(rounded.adjusted()) < 30 else str(rounded.normalize())
