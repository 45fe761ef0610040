"""Compares two SymPy expressions by evaluating both at a few points, to 30 digits.

Simplifying a difference to zero can take very long; evaluating it is quick. Expressions that agree at every point to so many
digits count as equal; expressions that do not are certainly different. The points depend only on the names of the variables,
so a verdict is reproducible. What cannot be evaluated, such as f(x), is simplified.
"""

from __future__ import annotations

import zlib
from fractions import Fraction
from typing import Any

from llamarl.tasks.math.magnitude import is_small
from llamarl.tasks.math.quick_verdict import DIGITS, PLACES

_DIGITS = 30
_INTEGRAL_DIGITS = 15
_NUM_POINTS = 6
_ENOUGH_POINTS = 2
_EXACT = Fraction(1, 10**20)
_INTEGRATED = Fraction(1, 10**10)  # accuracy of numerical integrals
_NOTHING = Fraction(1, 10**60)  # smaller values count as zero: a difference that cancels out

Point = tuple[Fraction, Fraction]  # real and imaginary part


def same_value(one: Any, other: Any) -> bool:
    """Whether two numbers, terms with variables, or matrices are equal."""
    from sympy import Expr, MatrixBase, MatrixExpr

    if isinstance(one, (MatrixBase, MatrixExpr)) or isinstance(other, (MatrixBase, MatrixExpr)):
        return _same_matrix(one, other)
    if not isinstance(one, Expr) or not isinstance(other, Expr) or not (is_small(one) and is_small(other)):
        return False
    verdict = _same_at_points(one, other)
    return _same_when_simplified(one, other) if verdict is None else verdict


def is_multiple(one: Any, other: Any) -> int:
    """Return 1 or -1 if one is a positive or negative multiple of the other, else 0."""
    signs = set()
    ratio: Any = None
    for point in _points(one, other):
        first, second = _at(one, point), _at(other, point)
        if first is None or second is None or first[1] or second[1]:
            return 0
        if abs(first[0]) < _NOTHING or abs(second[0]) < _NOTHING:
            return 0
        now = first[0] / second[0]
        if ratio is not None and abs(now - ratio) > _EXACT * abs(ratio):
            return 0
        ratio = now
        signs.add(1 if now > 0 else -1)
    return signs.pop() if len(signs) == 1 else 0


def _same_matrix(one: Any, other: Any) -> bool:
    from sympy import MatrixBase

    if not is_small(one) or not is_small(other):
        return False
    first, second = one.doit(), other.doit()
    if not isinstance(first, MatrixBase) or not isinstance(second, MatrixBase) or first.shape != second.shape:
        return False
    return all(same_value(*pair) for pair in zip(first.flat(), second.flat(), strict=True))


def _same_at_points(one: Any, other: Any) -> bool | None:
    from sympy import Float, Integral

    rounded = one.has(Float) or other.has(Float)
    exact = _INTEGRATED if one.has(Integral) or other.has(Integral) else _EXACT
    first, second = _computable(one), _computable(other)
    variables = first.free_symbols | second.free_symbols
    seen = 0
    for point in _points(first, second):
        mine, theirs = _at(first, point), _at(second, point)
        if mine is None or theirs is None:
            continue
        close = _agree_rounded(mine, theirs, plain=not variables) if rounded else _agree(mine, theirs, exact)
        if not close:
            return False
        seen += 1
        if not variables:
            return True
    return True if seen >= _ENOUGH_POINTS else None


def _computable(expression: Any) -> Any:
    """Evaluate derivatives, limits, sums and the like; definite integrals are left for numerical evaluation."""
    from sympy import Integral

    if expression.has(Integral) and not expression.free_symbols:
        return expression
    return expression.doit()


def _points(one: Any, other: Any) -> list[dict[str, Any]]:
    from sympy import Rational

    names = sorted({symbol.name for symbol in one.free_symbols | other.free_symbols})
    points = []
    for number in range(_NUM_POINTS):
        point = {}
        for name in names:
            chance = zlib.crc32(f"{name} {number}".encode())
            negative = number == 1 or (number > 1 and chance & 1)
            point[name] = Rational(-1 if negative else 1) * Rational(3001 + chance % 16007, 7919)
        points.append(point)
    return points


def _at(expression: Any, point: dict[str, Any]) -> Point | None:
    """Return the real and imaginary part at a point, or None if there is no value."""
    from sympy import Integral

    values = {symbol: point[symbol.name] for symbol in expression.free_symbols}
    digits = _INTEGRAL_DIGITS if expression.has(Integral) else _DIGITS
    value = expression.evalf(digits, subs=values) if values else expression.evalf(digits)
    parts = value.as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    real, imaginary = (_fraction(part) for part in parts)
    return None if real is None or imaginary is None else (real, imaginary)


def _fraction(number: Any) -> Fraction | None:
    if number.is_Rational:
        return Fraction(int(number.p), int(number.q))
    if not number.is_finite:
        return None
    sign, mantissa, power, _ = number._mpf_
    if abs(power) > 10**5:
        return None
    value = Fraction(int(mantissa)) * Fraction(2) ** int(power)
    return -value if sign else value


def _agree(one: Point, other: Point, exact: Fraction) -> bool:
    size = _size(one, other)
    return _apart(one, other) <= exact * size or size < _NOTHING


def _agree_rounded(one: Point, other: Point, *, plain: bool) -> bool:
    """Whether values agree to six digits and, without variables, to six decimal places."""
    apart = _apart(one, other)
    return apart <= DIGITS * _size(one, other) and (apart <= PLACES or not plain)


def _apart(one: Point, other: Point) -> Fraction:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1]))


def _size(one: Point, other: Point) -> Fraction:
    return max(map(abs, (*one, *other)))


def _same_when_simplified(one: Any, other: Any) -> bool:
    from sympy import simplify

    return bool(simplify(one - other).is_zero)
