"""Scorers give 1 to their own answers and 0 to everything else, however odd the text; none of it is ever executed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.tasks.scorers import Scorer, exact, numeric

any_scorer = pytest.mark.parametrize("scorer", [exact, numeric])
# All of Unicode, surrogates and NUL included: a model can produce any of it.
any_text = st.text(alphabet=st.characters(codec=None), max_size=40)


@any_scorer
@given(st.integers(-(10**12), 10**12))
def test_a_scorer_accepts_its_own_answer(scorer: Scorer, number: int) -> None:
    assert scorer(str(number), str(number), "") == 1.0
    assert scorer(f" {number}\n", str(number), "") == 1.0
    assert scorer(str(number + 1), str(number), "") == 0.0


@any_scorer
@given(any_text)
def test_any_text_scores_0_or_1_without_an_error(scorer: Scorer, text: str) -> None:
    assert scorer(text, "82", "") in (0.0, 1.0)
    assert scorer("82", text, "") in (0.0, 1.0)


ODD = [
    "",
    " ",
    "8 2",
    "82.",
    "82,0",
    "8_2",
    "0x52",
    "82e0",
    "82\x00",
    "\x0082",
    "٨٢",  # Arabic-Indic digits
    "８２",  # full-width digits  # noqa: RUF001
    "8²",
    "82\u200b",
    "\ud800",
    "82\udcff",
    "--82",
    "nan",
    "inf",
    "True",
    "[82]",
    "41+41",
    "__import__('os').getpid()",
    "82; import os",
    "82" * 1000,
    "9" * 100_000,
    "82\n82",
]


@any_scorer
@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_what_is_not_the_number_scores_nothing(scorer: Scorer, text: str) -> None:
    assert scorer(text, "82", "41+41=") == 0.0


@pytest.mark.parametrize("text", ["82", "082", "82.0", "+82", "0082.000", " 82 ", "\t82\n"])
def test_numeric_takes_every_plain_way_to_write_the_number(text: str) -> None:
    assert numeric(text, "82", "") == 1.0
    assert numeric("82", text, "") == 1.0


@pytest.mark.parametrize("text", ["082", "82.0", "+82"])
def test_exact_takes_one_way_only(text: str) -> None:
    assert exact(text, "82", "") == 0.0


def test_numeric_tells_long_numbers_apart() -> None:
    """As floats they would be equal."""
    assert numeric("0.1", "0.10000000000000000001", "") == 0.0
    assert numeric(str(10**30), str(10**30 + 1), "") == 0.0
    assert numeric("-0", "0", "") == 1.0


@any_scorer
def test_a_huge_completion_costs_next_to_nothing(scorer: Scorer) -> None:
    started_s = time.perf_counter()
    for text in ("9" * 1_000_000, " " * 1_000_000, "1." * 500_000, "-" * 1_000_000):
        assert scorer(text, "82", "") == 0.0
    assert time.perf_counter() - started_s < 2.0
