"""A number is read whole, with its sign, in every notation; what is not one number is not read at all."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from random import Random

import pytest

from llamarl.config import RewardConfig
from llamarl.tasks.math.quick_verdict import quick_verdict
from llamarl.tasks.numbers import read_number
from llamarl.tasks.scorers import make_safe_scorer

_SCORER = make_safe_scorer("numeric", RewardConfig())
assert _SCORER is not None
score = _SCORER

MINUS = ("-", "−", "–", "－", "- ", "-$", "minus ", "negative ")  # noqa: RUF001


@pytest.mark.parametrize("minus", MINUS)
@pytest.mark.parametrize("wrap", ["{}", r"\boxed{{{}}}", "#### {}", "So it is {}.", "It was {} degrees."])
def test_a_sign_is_never_lost(minus: str, wrap: str) -> None:
    text = wrap.format(f"{minus}5")
    assert (score(text, "5", ""), score(text, "-5", "")) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 1/2", "3/2"),
        ("2 3/4 cups", "11/4"),
        (r"1\frac12", "3/2"),
        ("1½", "3/2"),
        ("½", "1/2"),
        ("-1½", "-3/2"),
        ("1e3", "1000"),
        ("1.5e6", "1500000"),
        (r"1.5 \times 10^{3}", "1500"),
        (r"\frac{1}{2}", "1/2"),
        ("3 million", "3000000"),
        ("2 dozen eggs", "24"),
        (r"0.\overline{3}", "1/3"),
        (r"0.1\overline{6}", "1/6"),
        ("**18**", "18"),
        ("£1000", "1000"),
        ("€1,000", "1000"),
        ("18 km/h", "18"),
        ("18 m", "18"),
        ("18cm", "18"),
        ("18°", "18"),
        ("(18)", "18"),
        ("= 18", "18"),
        ("x=18", "18"),
        ("18=x", "18"),
        ("Total cost = $18", "18"),
        (r"\text{18}", "18"),
        ("18 cm²", "18"),
        ("18</s>", "18"),
        ("50%", "50"),
        (r"50\%", "50"),
    ],
)
def test_every_notation_is_read_as_what_it_says(text: str, value: str) -> None:
    found = read_number(text)
    assert found is not None and found.value == Fraction(value)
    assert score(f"\\boxed{{{text}}}", value, "") == 1.0


NOT_ONE = [
    *("17 25", "1 2 3 4", r"5\,7", "1_000", "2^{10}", "5 squared", "5 below zero", "5 or six", "5 or 6", "not 5", "5?"),
    *("between 5 and 6", "5 to 6", "5-6", "5, 6", "5=7=12", "5 and a half", r"17\frac{25}{1}", "--5", "1010_2", "5k"),
    *("5 thirds", "5 thouſand", "1/0", "5!", "5x", "5 x", "1.2.3", "5:30", "1,22", "0x10", "[5]", "３"),  # noqa: RUF001
]


@pytest.mark.parametrize("text", NOT_ONE)
def test_what_is_not_one_number_is_not_read_in_part(text: str) -> None:
    assert read_number(text) is None
    for value in (*range(-20, 60), 57, 1000, 1024):
        assert score(f"\\boxed{{{text}}}", str(value), "") == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so he has 18 apples.", "18"),
        ("it cost about 3 million dollars", "3000000"),
        ("She needs 2 3/4 cups.", "11/4"),
        ("It holds 1.5e6 of them.", "1500000"),
        ("6*3=<<6*3=18>>18 eggs every day", "18"),
        ("In 2020, she was **18**.", "18"),
        ("He has 18 (eighteen) of them", "18"),
        ("It weighs 18 g of CO2.", "18"),
        ("He ate 3, and 18 remain.", "18"),
        ("It is 18!", "18"),
    ],
)
def test_the_last_number_of_a_sentence_is_read_whole(text: str, value: str) -> None:
    assert score(text, value, "") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        *(
            "5 or 6",
            "it is 6 or 5",
            "it is 5 or six",
            "it is not 5",
            "it isn't equal to 5",
            "it is between 4 and 5",
            "is it 5?",
        ),
        *(
            "2^{5}",
            "x_5",
            "f(5)",
            "3 + 5",
            "3 x 5",
            "3 * 5",
            "5:05",
            "1.2.5",
            "1 5",
            "5 squared",
            "5 degrees below zero",
        ),
        *(
            "half of 5",
            "twice 5",
            r"5\pi",
            r"\sqrt{5}",
            "1_5",
            "more than 5",
            "4–5",  # noqa: RUF001
            "5 and a half",
            "5 is wrong",
            "maybe 5",
        ),
        *("20% of 5", "it is 5k", "10-5", "1,5", "４5", "5 thousandths"),  # noqa: RUF001
    ],
)
def test_a_number_in_something_larger_or_denied_is_no_answer(text: str) -> None:
    assert score(text, "5", "") == 0.0


def notations(value: int) -> Iterator[tuple[str, Fraction]]:
    """More than forty ways to write a number made of this one, each with what it is worth."""
    size, sign = abs(value), "-" if value < 0 else ""
    grouped = f"{size:,}"
    for text in (
        str(size),
        grouped,
        grouped.replace(",", "{,}"),
        grouped.replace(",", r",\!"),
        grouped.replace(",", " "),
    ):
        for before, after in (
            ("", ""),
            ("$", ""),
            ("", ".0"),
            ("", " dollars"),
            ("", r"\text{ cm}"),
            ("", "%"),
            ("", "kg"),
        ):
            yield f"{sign}{before}{text}{after}", Fraction(value)
    yield f"{sign}{size}e2", Fraction(value) * 100
    yield f"{sign}{size}.5E1", Fraction(sign + f"{size}.5") * 10
    yield f"{sign}{size}.25", Fraction(sign + f"{size}.25")
    yield f"{sign}{size} thousand", Fraction(value) * 1000
    yield f"{sign}{size}/7", Fraction(value, 7)
    yield f"{sign}\\frac{{{size}}}{{9}}", Fraction(value, 9)
    yield f"{sign}\\dfrac{{{size}}}{{11}}", Fraction(value, 11)
    yield f"{sign}{size} 1/3", Fraction(value) + Fraction(1, 3) * (-1 if sign else 1)
    yield f"{sign}{size}\\frac{{2}}{{5}}", Fraction(value) + Fraction(2, 5) * (-1 if sign else 1)
    yield f"{sign}{size}¾", Fraction(value) + Fraction(3, 4) * (-1 if sign else 1)
    yield f"{sign}{size}.\\overline{{6}}", Fraction(value) + Fraction(2, 3) * (-1 if sign else 1)
    yield f"{sign}{size} \\times 10^{{4}}", Fraction(value) * 10**4
    yield f"x = {sign}{size}", Fraction(value)
    yield f"**{sign}{size}**", Fraction(value)


def test_right_forms_score_and_forms_of_every_other_value_do_not() -> None:
    chance = Random(0)
    values = [chance.randint(-(10 ** chance.randint(1, 7)), 10 ** chance.randint(1, 7)) for _ in range(60)]
    forms = [form for value in values if value for form in notations(value)]
    assert len(list(notations(1234))) >= 40
    for text, value in forms:
        gold = str(value)
        assert score(f"\\boxed{{{text}}}", gold, "") == 1.0, (text, gold)
        assert score(f"#### {text}", gold, "") == 1.0, (text, gold)
        assert quick_verdict(text, gold) == 1.0, (text, gold)
        for other, worth in chance.sample(forms, 20):
            if worth != value:
                assert score(f"\\boxed{{{other}}}", gold, "") == 0.0, (other, gold)
                assert quick_verdict(other, gold) == 0.0 or abs(worth - value) <= Fraction(1, 10**6), (other, gold)
