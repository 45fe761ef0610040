"""Evaluates text that is a formula, and nothing else: what `eval` becomes in a worker whose scorers evaluate answers.

Some scorers of reasoning-gym call `eval` on what the policy wrote, or SymPy's `parse_expr`, which does. Here a formula is
numbers, text, lists and operators, and of names only SymPy's constants and functions and those that the caller gives.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}
_MAKERS = ("Integer", "Float", "Rational", "Symbol", "sqrt")  # what `parse_expr` writes around numbers and names


def evaluate_formula(
    source: Any, globals: Mapping[str, Any] | None = None, locals: Mapping[str, Any] | None = None
) -> Any:
    """The value of a formula, called like `eval`. SyntaxError for anything else, so that a scorer takes it for wrong."""
    if not isinstance(source, str):
        raise SyntaxError("not a formula")
    return _Formula(globals or {}, locals or {}).value(ast.parse(source.strip(), mode="eval").body)


class _Formula:
    def __init__(self, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._known, self._given = known, given

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() | complex() | str() | None as value):
                return value
            case ast.List(elts=items):
                return [self.value(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return _UNARY[type(op)](self.value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self.value(left), self.value(right))
            case ast.Name(id=name):
                return self._constant(name)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self._function(name)(*(self.value(arg) for arg in args))
            case _:
                raise SyntaxError("not a formula")

    def _constant(self, name: str) -> Any:
        from sympy import Basic

        found = self._given.get(name, self._known.get(name))
        if not isinstance(found, Basic):
            raise SyntaxError(f"not a formula: {name}")
        return found

    def _function(self, name: str) -> Callable[..., Any]:
        from sympy import Function

        found: Callable[..., Any] | None = self._known.get(name)
        if not callable(found) or not (name in _MAKERS or (isinstance(found, type) and issubclass(found, Function))):
            raise SyntaxError(f"not a formula: {name}")
        return found
