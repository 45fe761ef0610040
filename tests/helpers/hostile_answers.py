"""Completions that try to break a scorer: named cases from a file, and any number of random ones.

The right answer is always 42, and none of these gives it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

FILE = Path(__file__).parents[1] / "data" / "hostile.json"
ANSWER = "42"
MARK = "LLAMARL_WAS_HERE"  # name of a file that every injected command tries to create

_PIECES = [
    *"0123456789+-*/^=<>()[]{}|!,.;:%$#&~'\"\\ \n\t_xyzabie",
    *[
        "\\frac{1}{2}",
        "\\sqrt{",
        "\\sqrt[3]{2}",
        "\\left(",
        "\\right)",
        "\\pi",
        "\\infty",
        "\\cup",
        "\\cap",
        "\\in",
        "\\le",
    ],
    *[
        "\\text{",
        "\\boxed{",
        "\\binom{5}{2}",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "\\\\",
        "^\\circ",
        "\\sin",
        "\\log_2",
    ],
    *["\\int_0^1", "\\sum_{n=1}^{9}", "\\cdot", "\\times", "\\pm", "x^2", "2x", "(1,2)", "[0,1)", "\\{1,2\\}", "1/3"],
    *["π", "√", "∞", "½", "²", "°"],
    *[
        "answer is ",
        "####",
        "<think>",
        "</think>",
        "(A)",
        "and ",
        "import os",
        "__class__",
        "lambda:",
        "eval(",
        "{{",
        "%s",
    ],
    f"__import__('os').system('touch {MARK}')",
]
_ODD = ["\x00", "\ud800", "\u202e", "４", "٤", "\u200b", "😀", "é", "\x1b", "\ufeff", "\udfff", "ⅷ", "𝟒"]  # noqa: RUF001
_TOWERS = ["9^{9^{9^{9}}}", "99999999!", "\\sum_{n=1}^{10^{12}} n^n", "2^{2^{2^{2^{2^{2}}}}}"]
_WRAPS = ["\\boxed{%s}", "$%s$", "#### %s", "The answer is %s.", "%s", "\\[%s\\]", "<think>%s</think>", "%s\n%s"]


class Case(NamedTuple):
    name: str
    text: str


def named_cases() -> Iterator[Case]:
    """Yield the named cases one by one, since some are 10 MB."""
    for case in json.loads(FILE.read_text()):
        yield Case(case["name"], "".join(unit * count for unit, count in case["parts"]))


def random_cases(count: int, seed: int = 0) -> Iterator[Case]:
    chance = Random(seed)
    for number in range(count):
        if number % 500 == 499:  # such answers take the whole time limit
            inside = chance.choice(_TOWERS)
        else:
            inside = "".join(chance.choices(_PIECES, k=chance.choice((1, 2, 3, 5, 8, 13, 40, 200))))
        if number % 2:
            inside += chance.choice(_ODD)
        text = chance.choice(_WRAPS).replace("%s", inside)
        if ANSWER not in text:
            yield Case(f"random {number}", text)
