"""Programs as answers: where a completion holds one, the tests it must pass, and what passing means.

A test is an input with the output it must give, or a call with the value it must return. Expected outputs and values never
go where the program runs, so there is nothing to find, to patch or to print: a test is passed by being right.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from llamarl.config import Sandbox as Limits
from llamarl.tasks.rows import BadRow
from llamarl.tasks.sandbox.probe import open_sandbox
from llamarl.tasks.sandbox.run import Ran, Sandbox

_FENCE = re.compile(r"^[ \t]{0,8}```[ \t]{0,4}([A-Za-z0-9_+-]{0,20})[^\n`]{0,80}$", re.MULTILINE)
_MAX_CHARS = 200_000
_CLOSE = 1e-9  # numbers that differ by no more, as a share of them, are the same where one of them is a float

Scorer = Callable[[str, str, str], float]


class Test(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Either `input` and `output`, or `call`, `args`, `kwargs` and `expected`."""

    input: str = ""
    output: str | None = None
    call: str = ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    expected: Any = msgspec.UNSET

    @property
    def problem(self) -> str:
        """What is wrong with it; empty: nothing."""
        if self.call and (self.output is not None or self.input):
            return "is a call with an input or output; it can be only one of both"
        if self.call:
            return "" if self.expected is not msgspec.UNSET else f"calls {self.call} and expects nothing"
        return "has neither 'output' nor 'call'" if self.output is None else ""


_decode = msgspec.json.Decoder(tuple[Test, ...]).decode


def check_tests(value: Any) -> str:
    """The tests of a row as text, which is how they travel as a problem's answer; raises BadRow."""
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        tests = read_tests(text)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRow(f"'tests': {error}") from None
    if not tests:
        raise BadRow("'tests' is empty; a program that nothing is asked of would always be right")
    for number, test in enumerate(tests, start=1):
        if test.problem:
            raise BadRow(f"'tests': number {number} {test.problem}")
    return text


def read_tests(text: str) -> tuple[Test, ...]:
    return _decode(text.encode())


def program_in(completion: str) -> str:
    """The last fenced block that is Python, or of no language; without any fence, the whole text."""
    text = completion[-_MAX_CHARS:]
    return text if _FENCE.search(text) is None else fenced_program(text) or ""


def fenced_program(said: str) -> str | None:
    """The last fenced block that is Python, or of no language."""
    blocks = _blocks(said[-_MAX_CHARS:])
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3", "")]
    return python[-1] if python else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, code); a fence that is never closed runs to the end."""
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif not fence.group(1):
            yield opened.group(1), text[opened.end() + 1 : fence.start()]
            opened = None
    if opened is not None:
        yield opened.group(1), text[opened.end() + 1 :]


def same_output(given: bytes, expected: str) -> bool:
    """Line by line; blanks at the end of lines and empty lines at the end aside."""
    return _lines(given.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same_value(given: Any, expected: Any) -> bool:
    """Of what JSON can say, and of the same kind: True is not 1, and nothing is equal to NaN."""
    if isinstance(expected, bool) or isinstance(given, bool) or expected is None or given is None:
        return given is expected
    if isinstance(expected, int | float) and isinstance(given, int | float):
        return _same_number(given, expected)
    if isinstance(expected, Mapping) and isinstance(given, Mapping):
        return given.keys() == expected.keys() and all(same_value(given[key], expected[key]) for key in expected)
    if isinstance(expected, list) and isinstance(given, list):
        return len(given) == len(expected) and all(map(same_value, given, expected))
    return type(given) is type(expected) and bool(given == expected)


def _same_number(given: float, expected: float) -> bool:
    if isinstance(given, int) and isinstance(expected, int):
        return given == expected
    try:
        return math.isclose(given, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
    except OverflowError:
        return False


class Examiner:
    """Runs programs against tests. With `share`, the reward is the share of tests passed; else 1 for all of them."""

    def __init__(self, sandbox: Sandbox, limits: Limits, *, share: bool) -> None:
        self._sandbox, self._limits, self._share = sandbox, limits, share

    def score(self, completion: str, answer: str, prompt: str) -> float:
        program, tests = program_in(completion), read_tests(answer)
        if not program.strip() or not tests:
            return 0.0
        passed, deadline_s = 0, time.monotonic() + self._limits.answer_s
        for number, good in enumerate(self._verdicts(program, tests), start=1):
            passed += good
            if time.monotonic() > deadline_s or (passed < number and not self._share):
                break
        return passed / len(tests) if self._share else float(passed == len(tests))

    def _verdicts(self, program: str, tests: Sequence[Test]) -> Iterator[bool]:
        """Calls go into one run where all of them are wanted; a run of its own for each where a share counts."""
        calls = [test for test in tests if test.call]
        for group in [[test] for test in calls] if self._share else [calls] if calls else []:
            ran = self._sandbox.call(program, [{"call": t.call, "args": t.args, "kwargs": t.kwargs} for t in group])
            yield from _returned(ran, group)
        for test in tests:
            if not test.call:
                ran = self._sandbox.run(program, test.input)
                yield ran.succeeded and same_output(ran.stdout, test.output or "")


def _returned(ran: Ran, tests: Sequence[Test]) -> list[bool]:
    if not ran.succeeded or ran.results is None or len(ran.results) != len(tests):
        return [False] * len(tests)
    return [same_value(result, test.expected) for result, test in zip(ran.results, tests, strict=True)]


def load_examiner(limits: Limits, *, share: bool) -> Scorer:
    """Raises ConfigError where programs cannot be run safely."""
    return Examiner(open_sandbox(limits), limits, share=share).score
