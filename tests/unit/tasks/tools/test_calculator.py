"""The calculator computes what is an expression, says what is wrong with what is none, and cannot be kept busy."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.tasks.tools.calculator import NoExpression, compute, last_expression


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2", "3"),
        (" 2 + 3 * 4 ", "14"),
        ("(2+3)*4", "20"),
        ("10/4", "2.5"),
        ("1/3", "0.333333333333"),
        ("2**10", "1024"),
        ("2^-2", "0.25"),
        ("-3+-4", "-7"),
        ("-2**2", "-4"),
        ("0.1+0.2", "0.3"),
        ("999999999999*999999999999", "999999999998000000000001"),
        ("7", "7"),
        (".5*4", "2"),
    ],
)
def test_expressions_are_computed_exactly(text: str, value: str) -> None:
    assert compute(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("1+", "ends too early"),
        ("(1", "not closed"),
        ("1)", "unexpected"),
        ("1 2", "unexpected"),
        ("*1", "unexpected"),
        ("__import__('os')", "cannot read"),
        ("9**9**9**9", "unexpected"),
        ("9**99", "powers"),
        ("2**0.5", "powers"),
        ("(" * 100 + "1" + ")" * 100, "too deeply"),
        ("1+" * 300 + "1", "too long"),
        ("((9**60)**60)**60", "too large"),
        ("", "ends too early"),
        ("\u0661+\u0662", "cannot read"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(NoExpression, match=reason):
        compute(text)


@given(text=st.text(alphabet="0123456789+-*/^(). ", max_size=400))
def test_nothing_takes_long(text: str) -> None:
    start_s = time.perf_counter()
    with suppress(NoExpression):
        assert len(compute(text)) < 1000
    assert time.perf_counter() - start_s < 1.0


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("12+34=", "12+34"),
        ("What is 12 + 34 =", "12 + 34"),
        ("so 4*(5-2)", "4*(5-2)"),
        ("12+34=46", None),
        ("12+34=46+1", "46+1"),
        ("46", None),
        ("-46", None),
        ("hello", None),
        ("12+34= yes", None),
        ("", None),
    ],
)
def test_the_expression_at_the_end_is_found(text: str, expression: str | None) -> None:
    assert last_expression(text) == expression
