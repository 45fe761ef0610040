"""Whether two mathematical expressions are equal: math-verify, in a worker that was made for it.

math-verify reads LaTeX by a grammar and compares with SymPy. SymPy, though, turns text into numbers by `parse_expr`, which
is Python's `eval`: it is taken out here and replaced by one that reads plain numbers and nothing else. Of math-verify's
two ways to find an answer only LaTeX is used. Its time-outs, made with SIGALRM, are off: the pool's come from outside and
cannot be missed. This file imports no SymPy until it is asked to.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

EXTRA_MISSING = "the math scorer needs math-verify: pip install 'llamarl[math]'"

_INTEGER = re.compile(r"[0-9]{1,1000}")
_DECIMAL = re.compile(r"[0-9]{0,1000}\.[0-9]{1,1000}|[0-9]{1,1000}\.")

# One expression of each kind, so that the parser's tables are filled and SymPy's modules loaded before the first fork.
_WARM_UP = (
    (r"\frac{\sqrt{3}}{2}", r"\dfrac{3}{2\sqrt{3}}"),
    (r"2x^2 - 3x + 1", r"(2x-1)(x-1)"),
    (r"(-\infty, 3] \cup [5, \infty)", r"(-\infty,3]\cup[5,\infty)"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}"),
    (r"x \le 4", r"4 \ge x"),
    (r"y = 3x + 2", r"3x - y + 2 = 0"),
    (r"3 + 4i", r"4i+3"),
    (r"(3, \frac{\pi}{2})", r"(3, 1.5)"),
    (r"\{1, 2, 3\}", r"3, 2, 1"),
    (r"50\%", r"0.5"),
    (r"\text{east}", r"\text{west}"),
    (r"\sin^2 x + \cos^2 x", r"1"),
    (r"\log_2 8 + \ln e", r"\sqrt[3]{64}"),
    (r"\binom{5}{2}", r"\left\lfloor 10.5 \right\rfloor"),
    (r"10!", r"5^{2^{2}}"),
    (r"1.5 \times 10^{3}", r"1{,}500"),
    (r"\frac{1}{2}\text{ cm}", r"0.5 \text{ cm}"),
    (r"45^\circ", r"45"),
    (r"x=1 \text{ or } x=2", r"x=2, x=1"),
    (r"1001_2", r"9"),
    (r"1 < x < 2", r"(1,2)"),
    (r"a^2+2ab+b^2", r"(a+b)^2"),
)


def load_equal() -> Callable[[str, str], bool]:
    """equal(gold, given), on LaTeX. Raises ImportError with the command that installs what is missing."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        raise ImportError(EXTRA_MISSING) from None
    _take_out_eval()
    logging.disable(logging.CRITICAL)  # it warns that its own time-outs are off
    targets = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(latex: str) -> list[Any]:
        text = latex if "$" in latex else f"\\boxed{{{latex}}}"
        found: list[Any] = parse(text, extraction_config=targets, parsing_timeout=None, raise_on_error=True)
        return found

    def same(gold: Any, given: Any) -> bool:
        """What cannot be compared is not the same; what there was no room to compare is a failure."""
        try:
            if _is_infinite(given) and not _is_infinite(gold):
                return False
            return bool(verify(gold, given, timeout_seconds=None, raise_on_error=True))
        except (MemoryError, RecursionError):
            raise
        except Exception:
            return False

    def equal(gold: str, given: str) -> bool:
        wanted, found = read(gold), read(given)
        return any(same(one, other) for one in wanted for other in found)

    for gold, given in _WARM_UP:
        equal(gold, given)
    return equal


def _is_infinite(expression: Any) -> bool:
    """Whether infinity, or what is no number, is in it. SymPy finds such things equal to anything: with math-verify alone,
    8^\\infty\\pi is the right answer to every question."""
    from sympy import Basic, S

    if not isinstance(expression, Basic):
        return False
    endless = (S.Infinity, S.NegativeInfinity, S.ComplexInfinity, S.NaN)
    return bool(expression.has(*endless) or expression.doit().has(*endless))


def _take_out_eval() -> None:
    """Wherever SymPy, math-verify and its parser would evaluate text, they now read a number or refuse."""
    import latex2sympy2_extended.latex2sympy2
    import math_verify.parser
    import sympy.parsing.sympy_parser
    import sympy.physics.units  # which `simplify` imports, and which makes its own names from text
    from sympy import Float, Integer

    def read_number(text: str, *args: Any, **kwargs: Any) -> Any:
        bare = text.strip()
        if _INTEGER.fullmatch(bare):
            return Integer(int(bare))
        if _DECIMAL.fullmatch(bare):
            return Float(bare)
        raise SyntaxError("not a plain number")

    _take_out_generated_code()
    for module in (sympy.parsing.sympy_parser, math_verify.parser, latex2sympy2_extended.latex2sympy2):
        module.parse_expr = read_number


def _take_out_generated_code() -> None:
    """SymPy writes its arithmetic of monomials as Python text for each number of variables, and executes that. Its plain
    functions do the same."""
    from sympy.polys import monomials

    def multiply_by_power(a: tuple[int, ...], b: tuple[int, ...], k: int) -> tuple[int, ...]:
        return tuple(x + y * k for x, y in zip(a, b, strict=True))

    plain = {name: getattr(monomials, f"monomial_{name}") for name in ("mul", "pow", "ldiv", "div", "lcm", "gcd")}
    for name, function in {**plain, "mulpow": multiply_by_power}.items():
        setattr(monomials.MonomialOps, name, lambda self, function=function: function)
