"""The final answer is found where people and models put it, and nowhere else."""

from __future__ import annotations

import pytest

from llamarl.tasks.extract import after_hashes, boxed, final_answer, gold_answer, last_number
from llamarl.tasks.math.latex import canonical
from llamarl.tasks.math.quick_verdict import is_readable, quick_verdict
from llamarl.tasks.numbers import read_number
from llamarl.tasks.scorers import same_number


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"first \boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\boxed{1},\boxed{2}, \boxed{3}", "1, 2, 3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"so $\boxed 7$.", "7"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{", None),
        ("boxed{7}", None),
        ("", None),
        (r"\boxed{1}" + "x" * 5000, None),
    ],
)
def test_what_is_boxed(text: str, found: str | None) -> None:
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("a\n#### 1,000", "1,000"), ("#### 5\nmore", "5"), ("#### 1\n#### 2", "2"), ("####", None), ("### 3", None)],
)
def test_what_stands_after_hashes(text: str, found: str | None) -> None:
    assert after_hashes(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It costs $1,234.50 in all.", "1,234.50"),
        ("10-3 = 7.", "7"),
        ("10-3", None),
        ("it is -3", "-3"),
        ("a half, .5", ".5"),
        ("two thirds are 2/3.", "2/3"),
        ("1,2,3", None),
        ("H2O", None),
        ("none", None),
        ("４２", None),  # noqa: RUF001
    ],
)
def test_the_last_number(text: str, found: str | None) -> None:
    assert last_number(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"#### 1 \boxed{2} 3", "2"),
        ("4 #### 5", "5"),
        ("so $x = 3$, as 2 is even: $y$", "y"),
        ("The largest $n$ is 34.", "34"),
        (r"we get \( \frac{1}{2} \).", r"\frac{1}{2}"),
        ("thus $$ 9 $$", "9"),
        (r"\frac{10}{9}", r"\frac{10}{9}"),
        ("no idea", None),
    ],
)
def test_auto_takes_the_clearest_sign(text: str, found: str | None) -> None:
    assert final_answer(text, "auto", formulas=True) == found


def test_gold_may_be_an_answer_or_a_solution_that_ends_with_it() -> None:
    assert [gold_answer(text) for text in (" 18 ", "so <<1>>\n#### 18", r"thus $\boxed{x+1}$.")] == ["18", "18", "x+1"]


def test_each_setting_looks_in_its_own_place_only() -> None:
    text = "5 #### 6\n\\boxed{7} 8"
    sources = ("boxed", "hashes", "last_number", "whole", "auto")
    assert [final_answer(text, source) for source in sources] == ["7", "6", "8", text, "7"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1000", "1,000"),
        ("1000", "$1,000.00"),
        ("1000", "1{,}000"),
        ("1000", "1 000"),
        ("-0.5", r"-\frac{1}{2}"),
        ("1/2", r"\dfrac{2}{4}"),
        ("18", "18."),
        ("+7", "7"),
        ("-5", "-$5"),
        (r"\frac12", "0.5"),
        ("0", "-0"),
    ],
)
def test_the_same_number_however_it_is_written(one: str, other: str) -> None:
    first, second = read_number(one), read_number(other)
    assert first and second and first.value == second.value


@pytest.mark.parametrize(
    "text",
    ["18 dollars", r"18\text{ dollars}", r"18 \text{eggs per day}", r"\$18\ \mathrm{USD}", "18 a.m.", "$18$ cm", "18"],
)
def test_a_number_may_be_followed_by_what_it_counts(text: str) -> None:
    assert same_number(text, "18")


@pytest.mark.parametrize(
    "text",
    [
        "18 million",
        "18 dozen",
        "18 to 20",
        "18 or 19",
        "x18",
        "dollars 18",
        "18 dollars 5",
        r"18\pi",
        "18x2",
        "18x",
        "18 x",
        "dollars",
    ],
)
def test_words_that_change_the_value_are_no_units(text: str) -> None:
    assert not same_number(text, "18")


NO_NUMBERS = ["", "x", "1,22", "1,2,3", "1_000", "0x10", "1/0", "--1", "1 2", "5\\,7", "９", "1" * 300, "$", "."]  # noqa: RUF001


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_plain_number(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("given", "gold", "verdict"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}", 1.0),
        (r"\left( 3, 4 \right)", "(3,4)", 1.0),
        (r"\text{east}", "east", 1.0),
        (r"90^\circ", r"90^{\circ}", 1.0),
        ("0.333333", r"\frac{1}{3}", 1.0),
        ("0.3333", r"\frac{1}{3}", 0.0),
        ("12", "1 2", None),
        ("43", "42", 0.0),
        ("50\\%", "0.5", 0.0),
        ("50\\%", "50", 1.0),
        ("x+1", "1+x", None),
        ("4\x002", "42", 0.0),
        ("４２", "42", 0.0),  # noqa: RUF001
        ("(" * 41 + "1" + ")" * 41, "1", 0.0),
        ("1" * 1001, "1", 0.0),
    ],
)
def test_only_what_needs_algebra_goes_to_a_worker(given: str, gold: str, verdict: float | None) -> None:
    assert quick_verdict(given, gold) == verdict


def test_what_is_readable() -> None:
    assert is_readable(r"\frac{\pi}{2} ≤ √2 \cup [0, 1]")
    assert all(
        map(is_readable, [r"(-\infty, 3] \cup [5, \infty)", r"\left(-\infty, 3\right]", r"x < \infty", "(-∞, 2)"])
    )
    assert not any(map(is_readable, [r"8^\infty\pi", r"8^{\infty}", r"2\infty", r"\infty+1", r"\frac{\infty}{2}"]))
    assert not any(map(is_readable, ["\u202e1", "\ud800", "\x1b", "é", "\u200b"]))
    assert canonical(r"\frac{ 1 }{2} .") == r"\frac{1}{2}"
