r"""Corrects how latex2sympy reads numbers: it adds numbers that are side by side, so that `17 25` is 42 and `2(3)` is 5, and
ignores the base of a numeral. The corrected rules:

    2\frac{1}{2}      a mixed number, if the fraction is proper
    2(3), (2)(3)      a product
    17 25, 2{3}       not readable
    1010_2            a numeral in base two, equal only to itself; in base ten, the number
"""

from __future__ import annotations

import re
from typing import Any

_INTEGER = re.compile(r"[0-9][0-9,]{0,200}")
_NUMERAL = re.compile(r"\{?[0-9][0-9,.]{0,200}\}?")
_FRACTION = re.compile(r"\\frac\{([0-9]{1,200})\}\{([0-9]{1,200})\}")
_BASE = re.compile(r"_\{?([0-9]{1,3})\}?")


class NotReadable(Exception):
    """The text cannot be read. The reader itself also raises exceptions then."""


def patch_reader() -> None:
    """Replace the three incorrect methods of the reader."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    read_atom = _Latex2Sympy.convert_atom

    def convert_atom(self: Any, atom: Any) -> Any:
        numeral = atom.number_subexpr()
        if not numeral or not numeral.subexpr():
            return read_atom(self, atom)
        base = _BASE.fullmatch(numeral.subexpr().getText())
        if not base:
            raise NotReadable("a number has no index but its base")
        digits = numeral.NUMBER().getText().replace(",", "")
        return (
            self.parse_number(digits) if base[1] == "10" else sympy.Symbol(f"{digits.lstrip('0')}_{base[1]}", real=True)
        )

    def convert_binom(self: Any, binom: Any) -> Any:
        top, bottom = self.convert_expr(binom.upper), self.convert_expr(binom.lower)
        return sympy.binomial(top, bottom, evaluate=False)

    _Latex2Sympy.convert_atom = convert_atom
    _Latex2Sympy.convert_binom = convert_binom
    _Latex2Sympy.convert_postfix_list = _read_side_by_side


def _read_side_by_side(reader: Any, nodes: Any, start: int = 0) -> Any:
    """Read terms without an operator between them, from left to right."""
    import sympy

    texts = [node.getText() for node in nodes]
    found = reader.convert_postfix(nodes[start])
    if isinstance(found, list):  # as in d/dx
        if len(found) != 1 or start == len(nodes) - 1:
            raise NotReadable("a derivative of nothing")
        return sympy.Derivative(_read_side_by_side(reader, nodes, start + 1), found[0])
    for at in range(start + 1, len(nodes)):
        if not isinstance(found, (sympy.Expr, sympy.MatrixBase)):
            return found
        if at == start + 1 and _INTEGER.fullmatch(texts[start]) and (part := _FRACTION.fullmatch(texts[at])):
            found += _proper(int(part[1]), int(part[2]))
            continue
        if _are_numbers(texts[at - 1], texts[at]):
            raise NotReadable("numbers side by side")
        factor = reader.convert_postfix(nodes[at])
        if isinstance(factor, list):
            return _product(reader, found, _read_side_by_side(reader, nodes, at))
        found = _product(reader, found, factor)
    return found


def _proper(above: int, below: int) -> Any:
    from sympy import Rational

    if not 0 < above < below:
        raise NotReadable("a mixed number has a proper fraction")
    return Rational(above, below)


def _are_numbers(before: str, after: str) -> bool:
    """Whether two numbers are side by side, as in 17 25, 2^3 4, {2}{3}."""
    ends = before[-1:].isdigit() or bool(_NUMERAL.fullmatch(before))
    return ends and (after[:1].isdigit() or bool(_NUMERAL.fullmatch(after)))


def _product(reader: Any, one: Any, other: Any) -> Any:
    is_matrix = getattr(one, "is_Matrix", False) or getattr(other, "is_Matrix", False)
    return reader.mat_mul_flat(one, other) if is_matrix else reader.mul_flat(one, other)
