"""Decides whether two mathematical expressions are equal, by math-verify in a worker process.

math-verify reads LaTeX by a grammar and knows sets, intervals, relations and matrices. latex_reader.py corrects its reader,
comparison.py compares values, work_limit.py bounds the work of both, and without_eval.py removes all that would execute text.
Its own time-outs use SIGALRM and are off: the worker pool enforces its limits from outside. SymPy is imported only by
`load_equal`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from llamarl.tasks.math.comparison import is_multiple, same_value
from llamarl.tasks.math.latex import members_of, plain_latex
from llamarl.tasks.math.latex_reader import patch_reader
from llamarl.tasks.math.magnitude import is_small
from llamarl.tasks.math.without_eval import remove_eval
from llamarl.tasks.math.work_limit import MAX_COMPARING_CALLS, MAX_READING_CALLS, within_bounds
from llamarl.tasks.numbers import read_number

EXTRA_MISSING = "the math scorer needs math-verify: pip install 'llamarl[math]'"

_SHORT = 50

# Expressions of every kind. They fill the parser's tables and load SymPy's modules before the first fork.
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
    # Forms that are slow to parse for the first time.
    (r"11z^{17}(5+11z^{17})", r"-29x^5(7x^6-2)(x+1)"),
    (r"(x^2 + x + 1)(x^8 - x^7 + x^5 - 1)", r"\frac{x(x+1)}{(2-x)(y-1)} + \frac{1}{1+\frac{1}{1+\frac{1}{x}}}"),
    (
        r"(-\frac{9}{2}, -2) \cup (\frac{1 - \sqrt{5}}{2}, \frac{1 + \sqrt{5}}{2}]",
        r"[0, 1) \cup \{3\} \cup [-1, \infty)",
    ),
    (
        r"\begin{pmatrix} \frac{5}{6} & -\frac{1}{3} \\ x+1 & \sqrt{2} \end{pmatrix}",
        r"\begin{bmatrix} 1 \\ -2 \\ \pi \end{bmatrix}",
    ),
    (r"AB=9, CD=4", r"f(x+1)=\sin(\cos(2x))+|x-|y||"),
    (r"5x - 11y + z - 17 = 0", r"(a(b+c(d+1)))"),
    (r"\int_0^1 2x\,dx", r"\int x^2 e^{x} dx"),
    (r"\sum_{n=1}^{5} n^2", r"\prod_{k=1}^{3} (2k)"),
    (r"\lim_{x \to 0} \frac{\sin x}{x}", r"\frac{d}{dx} x^3"),
    (r"2^{3^{x}}", r"\sqrt{1+\sqrt{2+\sqrt{3}}}"),
    (r"(1,2), (3,-4), (\frac12, \sqrt3)", r"((1,2),(3,4))"),
    (r"abcdef", r"\text{a}\text{b}xy(z)w"),
    (r"\left(\begin{matrix} 1 & 2 \\ 3 & 4 \end{matrix}\right)^{-1}", r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}"),
    (r"|x-1| \ge 2", r"-3 \le 2x+1 < 5"),
)


def load_equal() -> Callable[[str, str], bool]:
    """Return equal(gold, given) for LaTeX. Raises ImportError with the install command if math-verify is missing."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError:
        raise ImportError(EXTRA_MISSING) from None
    from latex2sympy2_extended import NormalizationConfig

    remove_eval()
    patch_reader()
    _patch_grader()
    logging.disable(logging.CRITICAL)  # math-verify warns that its own time-outs are off
    as_it_is = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    targets = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=as_it_is)]

    def read(latex: str) -> list[Any]:
        text = latex if "$" in latex else f"\\boxed{{{latex}}}"
        found: list[Any] = parse(text, extraction_config=targets, parsing_timeout=None, raise_on_error=True)
        return found

    def same(gold: Any, given: Any) -> bool:
        """Expressions that cannot be compared differ. Running out of memory or stack is a failure instead."""
        try:
            if not is_small(given) or not is_small(gold) or (_is_infinite(given) and not _is_infinite(gold)):
                return False
            return bool(verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True))
        except (MemoryError, RecursionError):
            raise
        except Exception:
            return False

    def compare(wanted: list[Any], found: list[list[Any]]) -> bool:
        if len(found) > 1:
            return _is_right_chain(wanted, found, same)
        return any(same(one, other) for one in wanted for other in found[0])

    def read_all(members: list[str]) -> list[list[Any]]:
        return [read(member) for member in members]

    def equal(gold: str, given: str) -> bool:
        members = members_of(plain_latex(given).replace("$", ""))
        is_short = sum(map(len, members)) <= _SHORT  # counting calls doubles the time and is not needed for short texts
        found = (
            read_all(members)
            if is_short
            else within_bounds(lambda: read_all(members), MAX_READING_CALLS, otherwise=[[]])
        )
        wanted = read(_last_of_numbers(plain_latex(gold)))
        return within_bounds(lambda: compare(wanted, found), MAX_COMPARING_CALLS, otherwise=False)

    for pair in _WARM_UP:
        gold, given = map(read, map(plain_latex, pair))
        compare(gold, [given])
    return equal


def _last_of_numbers(gold: str) -> str:
    """Return the last number of a chain such as 0.56 = 56, and any other answer unchanged."""
    members = members_of(gold)
    return members[-1] if len(members) > 1 and all(map(read_number, members)) else gold


def _is_right_chain(wanted: list[Any], members: list[list[Any]], same: Callable[[Any, Any], bool]) -> bool:
    """Whether every part of a chain of equations is right. For 12, 6+6=12, x=12 and 12=x are right; 5=7=12 is not."""
    from latex2sympy2_extended import is_expr_of_only_symbols
    from math_verify.grader import is_equation
    from sympy import Basic, Eq, MatrixBase

    gold, values = wanted[0] if wanted else None, [member[0] if member else None for member in members]
    if not isinstance(gold, (Basic, MatrixBase)) or not all(
        isinstance(value, (Basic, MatrixBase)) for value in values[1:]
    ):
        return False
    if is_equation(gold):
        whole = isinstance(values[0], Basic) and same(gold, Eq(values[0], values[-1], evaluate=False))
        return whole and all(same(values[-1], value) for value in values[1:-1])
    known = [value for value in values if isinstance(value, (Basic, MatrixBase))]
    if not gold.free_symbols:
        said = [value for value in known if not value.free_symbols]
    else:
        said = [value for value in known if not is_expr_of_only_symbols(value)] or known[-1:]
    return bool(said) and all(same(gold, value) for value in said)


def _is_infinite(expression: Any) -> bool:
    """Whether it contains infinity or NaN. SymPy finds these equal to anything: with math-verify alone, 8^\\infty\\pi is the
    right answer to every question."""
    from sympy import Basic, S

    if not isinstance(expression, Basic):
        return False
    endless = (S.Infinity, S.NegativeInfinity, S.ComplexInfinity, S.NaN)
    return bool(expression.has(*endless) or expression.doit().has(*endless))


def _patch_grader() -> None:
    """Make math-verify compare values by our rule, and accept multiples of an equation without solving it."""
    from math_verify import grader
    from sympy import Eq

    solve_and_compare, same_name = grader.sympy_solve_and_compare, grader.sympy_compare_symbols
    opposite = grader.INVERSE_RELATIONS

    def compare(one: Any, other: Any, *settings: Any) -> bool:
        return same_value(one, other)

    def compare_relations(gold: Any, given: Any, *settings: Any) -> bool:
        sign = is_multiple(gold.lhs - gold.rhs, given.lhs - given.rhs)
        kind = type(given) if sign > 0 else opposite.get(type(given))
        if sign and ((isinstance(gold, Eq) and isinstance(given, Eq)) or type(gold) is kind):
            return True
        if len(gold.free_symbols | given.free_symbols) > 2:  # solving takes long and would find no other match
            return False
        return bool(solve_and_compare(gold, given, *settings))

    def compare_symbols(gold: Any, given: Any) -> bool:
        return bool(same_name(gold, given)) or same_value(gold, given)

    grader.sympy_compare_symbols = compare_symbols
    grader.sympy_numeric_eq = compare
    grader.sympy_symbolic_eq = lambda one, other: False  # `compare` has already decided
    grader.sympy_solve_and_compare = compare_relations
