"""Removes SymPy's ways to execute text, for a worker that reads what a policy wrote.

`parse_expr`, which turns text into numbers, uses `eval`. The arithmetic of monomials and `lambdify` generate Python code and
execute it. Some modules create classes from text when they are imported. The first three are replaced by functions that do
the same without executing text, and the modules are imported in advance.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import warnings
from collections.abc import Callable
from typing import Any

_RATIONAL = re.compile(r"(-?[0-9]{1,1000})(?:/([1-9][0-9]{0,999}))?")
_DECIMAL = re.compile(r"[0-9]{0,1000}\.[0-9]{1,1000}|[0-9]{1,1000}\.")
_PACKAGES = (
    "integrals",
    "series",
    "concrete",
    "solvers",
    "simplify",
    "calculus",
    "sets",
    "matrices",
    "polys",
    "functions",
)


def remove_eval() -> None:
    """Make SymPy, math-verify and its parser read a number or refuse, wherever they would evaluate text."""
    import latex2sympy2_extended.latex2sympy2
    import math_verify.parser
    import sympy.parsing.sympy_parser
    import sympy.physics.units  # `simplify` imports it, and it creates names from text
    from sympy import Float, Rational

    def read_number(text: str, *args: Any, **kwargs: Any) -> Any:
        bare = text.strip()
        if found := _RATIONAL.fullmatch(bare):
            return Rational(int(found[1]), int(found[2] or 1))
        if _DECIMAL.fullmatch(bare):
            return Float(bare)
        raise SyntaxError("not a plain number")

    _import_all()
    remove_monomial_code()
    _remove_lambdify()
    for module in (sympy.parsing.sympy_parser, math_verify.parser, latex2sympy2_extended.latex2sympy2):
        module.parse_expr = read_number


def take_names_without_exec() -> None:
    """Let `parse_expr` take SymPy's names as they are, where it would execute `from sympy import *`."""
    import sympy
    import sympy.parsing.sympy_parser

    names = {name: value for name, value in vars(sympy).items() if not name.startswith("_")}

    def take(source: str, into: dict[str, Any]) -> None:
        if source != "from sympy import *":
            raise SyntaxError("not a formula")
        into.update(names)

    sympy.parsing.sympy_parser.exec = take


def remove_monomial_code() -> None:
    """Use SymPy's plain functions for monomials instead of the Python code that it generates for each number of
    variables."""
    from sympy.polys import monomials

    def multiply_by_power(a: tuple[int, ...], b: tuple[int, ...], k: int) -> tuple[int, ...]:
        return tuple(x + y * k for x, y in zip(a, b, strict=True))

    plain = {name: getattr(monomials, f"monomial_{name}") for name in ("mul", "pow", "ldiv", "div", "lcm", "gcd")}
    for name, function in {**plain, "mulpow": multiply_by_power}.items():
        setattr(monomials.MonomialOps, name, lambda self, function=function: function)


def _remove_lambdify() -> None:
    """Replace `lambdify` where SymPy uses it internally: for roots of polynomials and for sums of hypergeometric terms."""
    from sympy.core import evalf
    from sympy.polys import rootoftools

    rootoftools.lambdify = evalf.lambdify = _polynomial


def _polynomial(variable: Any, expression: Any) -> Callable[[Any], Any]:
    """Return the polynomial as a function, by Horner's rule."""
    from mpmath import mp, mpmathify
    from sympy import Poly

    coefficients = Poly(expression, variable).all_coeffs()

    def compute(value: Any) -> Any:
        found = 0
        for coefficient in coefficients:
            exact = coefficient.is_Integer
            found = found * value + (int(coefficient) if exact else mpmathify(coefficient.evalf(mp.dps + 5)))
        return found

    return compute


def _import_all() -> None:
    """Import the modules that SymPy would import on first use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _PACKAGES:
            package = importlib.import_module(f"sympy.{name}")
            for module in pkgutil.walk_packages(package.__path__, f"sympy.{name}."):
                if not re.search(r"\.(?:tests|benchmarks)|_doc$", module.name):
                    importlib.import_module(module.name)
