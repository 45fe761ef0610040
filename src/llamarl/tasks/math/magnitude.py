"""Estimates the number of digits of a SymPy expression without evaluating it: 9^{9^9} must not be evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_DIGITS = 3000.0
_MAX_TERMS = 1000
_MAX_FACTORIAL = 1000
_MAX_EXPONENT_DIGITS = 8.0


def is_small(expression: Any) -> bool:
    """Whether it can be evaluated quickly, with small numbers for its variables."""
    from sympy import Basic, MatrixBase

    if isinstance(expression, MatrixBase):
        return all(map(is_small, expression.flat()))
    return not isinstance(expression, Basic) or _digits(expression, {}) <= MAX_DIGITS


def _digits(node: Any, variables: Mapping[Any, float]) -> float:
    """Return a bound on the digits of numerator and denominator, or infinity."""
    from sympy import Product, Sum, binomial, exp, factorial, factorial2, gamma, subfactorial

    if not node.args:
        return variables.get(node, _digits_of_leaf(node))
    if isinstance(node, (Sum, Product)):
        return _digits_of_series(node, variables, multiplied=isinstance(node, Product))
    sizes = [_digits(part, variables) for part in node.args]
    if max(sizes) > MAX_DIGITS:
        return math.inf
    if node.is_Pow or isinstance(node, exp):
        base = 1.0 if isinstance(node, exp) else sizes[0]
        return (base + 1) * _at_most(node.exp, sizes[-1])
    if isinstance(node, (factorial, factorial2, subfactorial, gamma, binomial)):
        top = _at_most(node.args[0], sizes[0])
        return top * math.log10(top + 2) if top <= _MAX_FACTORIAL else math.inf
    return max(sizes) + math.log10(len(sizes) + 1) if node.is_Add else sum(sizes)


def _digits_of_leaf(node: Any) -> float:
    if getattr(node, "is_Rational", False):
        return max(_log10(node.p), _log10(node.q))
    if getattr(node, "is_Float", False):
        return abs(float(math.log10(abs(node)))) + 1 if node else 1.0
    return 1.0


def _log10(number: int) -> float:
    return abs(number).bit_length() * math.log10(2)


def _at_most(node: Any, digits: float) -> float:
    """Return a bound on the absolute value of an exponent or an argument."""
    from sympy import Integral, Product, Sum

    if getattr(node, "is_Rational", False):
        return abs(node.p) / node.q if digits < _MAX_EXPONENT_DIGITS else math.inf
    if not node.free_symbols and not isinstance(node, (Sum, Product, Integral)):  # its own size has been checked
        value = node.evalf(5)
        return abs(complex(value)) if value.is_number and value.is_finite else math.inf
    return 10.0**digits if digits < _MAX_EXPONENT_DIGITS else math.inf


def _digits_of_series(node: Any, variables: Mapping[Any, float], *, multiplied: bool) -> float:
    inner = dict(variables)
    terms = 1.0
    for variable, *bounds in node.limits:
        ends = [_at_most(bound, _digits(bound, variables)) for bound in bounds]
        terms *= sum(ends) + 1
        inner[variable] = math.log10(sum(ends) + 2) if terms <= _MAX_TERMS else math.inf
    if terms > _MAX_TERMS:
        return math.inf
    term = _digits(node.function, inner)
    return term * terms if multiplied else term + math.log10(terms + 1)
