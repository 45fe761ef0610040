"""Checks that scorers accept their own gold answers, and none of thousands of wrong ones.

    python scripts/check_scorers.py FOLDER [FOLDER ...]

A FOLDER has any of gsm8k/{train,test}.jsonl, math/train.jsonl, math500/test.jsonl and svamp.jsonl (or easy/svamp.jsonl). Each
gold answer is given in a box and as the worked solution. Wrong answers are made from the gold ones: another number in many
notations, a lost sign, addends, alternatives, parts. Prints counts and every refusal. The exit code is 1 if a boxed gold
answer is refused, if more than a few solutions are (some box two answers, of which the last is gold), or if a wrong answer is
accepted or could not be judged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from random import Random

from check_gold import MIN_SHARE, check, data_files

from llamarl.tasks.extract import gold_answer
from llamarl.tasks.math.quick_verdict import is_close
from llamarl.tasks.numbers import read_number
from llamarl.types import Problem

_SHAPES = (
    *(
        "{}",
        "-{}",
        "−{}",  # noqa: RUF001
        "{}.0",
        "{}00",
        "{} dollars",
        "${}",
        "{}%",
        "{}e1",
        "{} million",
        "1 {}/7",
        "{}/3",
        "0.{}",
        "{} m",
    ),
    *(
        "**{}**",
        "x={}",
        "= {}",
        "{} squared",
        "minus {}",
        r"\frac{{{}}}{{7}}",
        r"{}\frac12",
        "{}½",
        "{}_2",
        "{}^2",
        "{}!",
        "{},5",
    ),
    *(
        "not {}",
        "{} or 7",
        "7 or {}",
        "between 1 and {}",
        "{}?",
        "{} {}",
        "1 2 {}",
        "{}=1={}",
        "1+{}",
        "({}, 1)",
        r"\sqrt{{{}}}",
    ),
)
_WRAPS = ("\\boxed{{{}}}", "#### {}", "So the answer is {}.")


def values(chance: Random, gold: Fraction) -> Iterator[int]:
    """Yield whole numbers near the right one and far from it."""
    middle = int(gold)
    yield from (middle, -middle, middle + 1, abs(middle) * 10, chance.randint(-100, 1000))


def meaning(shape: str, number: int) -> Fraction | None:
    """The value of a notation, computed independently of the scorers; None if it is not a number."""
    digits = str(number)
    powers = {"{}00": 100, "{}e1": 10, "{} million": 10**6}
    if shape in powers:
        return Fraction(number) * powers[shape]
    if shape in ("-{}", "−{}", "minus {}"):  # noqa: RUF001
        return -Fraction(number) if number >= 0 else None
    if shape in ("{}/3", r"\frac{{{}}}{{7}}"):
        return Fraction(number, 3 if shape == "{}/3" else 7)
    if shape in ("{}½", r"{}\frac12"):
        return number + Fraction(1, 2) * (-1 if number < 0 else 1) if number else Fraction(1, 2)
    if shape == "1 {}/7":
        return 1 + Fraction(number, 7) if 0 < number < 7 else None
    if shape == "0.{}":
        return Fraction(number, 10 ** len(digits)) if number >= 0 else None
    plain = ("{}", "{}.0", "{} dollars", "${}", "{}%", "**{}**", "x={}", "= {}", "{} m")
    return Fraction(number) if shape in plain else None


def expressions(shape: str, number: int) -> set[Fraction]:
    """Values of an expression, for the scorer that evaluates expressions."""
    found = {
        "{}^2": [number**2 if number >= 0 else -(number**2)],
        "1+{}": [1 + number],
        "{} {}": [2 * number] if number < 0 else [],  # -1 -1 is a difference
        "{},5": [5] if number == 5 else [],  # 5 twice is 5
        "{}=1={}": [number] if number == 1 else [],
        r"\sqrt{{{}}}": [int(number**0.5)] if number >= 0 and int(number**0.5) ** 2 == number else [],
    }
    if shape == "{}!" and 0 <= number <= 20:
        factorial = 1
        for factor in range(2, number + 1):
            factorial *= factor
        return {Fraction(factorial)}
    return {Fraction(value) for value in found.get(shape, [])}


def wrong_answers(gold: str, number: int, *, math: bool) -> Iterator[str]:
    """Yield completions that do not give the gold number, according to how they were made."""
    chance = Random(number)
    right = read_number(gold, symbols=False)
    if right is None:
        return
    for value in values(chance, right.value):
        shape = chance.choice(_SHAPES)
        said = meaning(shape, value)
        is_right = said is not None and (said == right.value or (math and is_close(said, right.value)))
        if not is_right and right.value not in expressions(shape, value):
            text = shape.format(value, value) if shape.count("{}") > 1 else shape.format(value)
            wrap = _WRAPS[0] if math else chance.choice(_WRAPS[:2] if said is None else _WRAPS)
            yield wrap.format(text)


def check_wrong(folder: Path) -> Iterator[tuple[str, int, list[str]]]:
    for kind, file, examples, judge in data_files(folder):
        asked: dict[tuple[int, str], str] = {}
        accepted: list[str] = []
        for number, example in list(enumerate(examples))[:: 10 if kind == "math" else 1]:  # math answers take a worker
            gold = gold_answer(example.answer)
            for text in wrong_answers(gold, number, math=kind == "math"):
                asked[number, text] = gold
                judge.ask((number, text), text, Problem(example.question, example.answer))
        while judge.num_pending:
            for key, outcome in judge.collect(1.0):
                if outcome.status != "ok" or outcome.reward:
                    assert isinstance(key, tuple)
                    accepted.append(f"{key[1]!r} for {asked[key]!r}: {outcome.reason or 'accepted'}")
        yield file, len(asked), accepted


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("name the folder with the data")
    failed = False
    for folder in map(Path, sys.argv[1:]):
        for report in check(folder):
            print(
                f"{report.file:22} gold as {report.way:8}  {report.num_answers:6} answers  {len(report.refused)} refused"
            )
            for refusal in report.refused:
                print(f"    refused {refusal.answer!r}: {refusal.reason}")
            failed = failed or report.share < (1.0 if report.way == "boxed" else MIN_SHARE)
        for file, count, accepted in check_wrong(folder):
            print(f"{file:22} wrong             {count:6} answers  {len(accepted)} accepted")
            for line in accepted:
                print(f"    accepted {line}")
            failed = failed or bool(accepted)
    sys.exit(failed)


if __name__ == "__main__":
    main()
