"""The code scorer: runs a program against tests. code_blocks.py finds the program in a completion.

A test is an input with its expected output, or a call with its expected value. Expected outputs and values never enter the
program's process, so it cannot find, patch or print them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from llamarl.config import SandboxConfig
from llamarl.tasks.code_blocks import program_in
from llamarl.tasks.data_files import BadRow
from llamarl.tasks.sandbox.probe import open_sandbox
from llamarl.tasks.sandbox.run import Ran, Sandbox

_CLOSE = 1e-9  # relative tolerance where one of two numbers is a float
_NEAR_ZERO = 1e-12  # absolute tolerance where 0 is expected: rounding errors such as 0.1 + 0.2 - 0.3

Scorer = Callable[[str, str, str], float]


class Test(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One test: either `input` and `output`, or `call`, `args`, `kwargs` and `expected`."""

    input: str = ""
    output: str | None = None
    call: str = ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    expected: Any = msgspec.UNSET

    @property
    def problem(self) -> str:
        """Return what is wrong with the test, or an empty text."""
        if self.call and (self.output is not None or self.input):
            return "is a call with an input or output; it can be only one of both"
        if self.call:
            return "" if self.expected is not msgspec.UNSET else f"calls {self.call} and expects nothing"
        if self.args or self.kwargs or self.expected is not msgspec.UNSET:
            return "has 'args', 'kwargs' or 'expected' but no 'call'"
        return "has neither 'output' nor 'call'" if self.output is None else ""


_decode = msgspec.json.Decoder(tuple[Test, ...]).decode


def check_tests(value: Any) -> str:
    """Return the tests of a row as text, in the form of a problem's answer. Raises BadRow."""
    text = value if isinstance(value, str) else json.dumps(value)
    read_tests(text)
    return text


def read_tests(text: str) -> tuple[Test, ...]:
    """Decode tests. Raises BadRow for unusable ones and for an empty list, which any program would pass."""
    try:
        tests = _decode(text.encode())
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRow(f"'tests': {error}") from None
    if not tests:
        raise BadRow("'tests' is empty; a program that nothing is asked of would always be right")
    for number, test in enumerate(tests, start=1):
        if test.problem:
            raise BadRow(f"'tests': number {number} {test.problem}")
    return tests


def same_output(given: bytes, expected: str) -> bool:
    """Compare line by line, ignoring blanks at the end of lines and empty lines at the end."""
    return _lines(given.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same_value(given: Any, expected: Any) -> bool:
    """Compare two JSON values of the same kind: True is not 1, and nothing equals NaN."""
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
        return abs(given) <= _NEAR_ZERO if expected == 0 else math.isclose(given, expected, rel_tol=_CLOSE)
    except OverflowError:
        return False


class Examiner:
    """Runs programs against tests. The reward is 1 for passing all of them, or with `share` the share of passed tests."""

    def __init__(self, sandbox: Sandbox, limits: SandboxConfig, *, share: bool) -> None:
        self._sandbox, self._limits, self._share = sandbox, limits, share

    def score(self, completion: str, answer: str, prompt: str) -> float:
        program, tests = program_in(completion), read_tests(answer)
        if not program.strip():
            return 0.0
        passed, deadline_s = 0, time.monotonic() + self._limits.answer_s
        for number, good in enumerate(self._verdicts(program, tests), start=1):
            passed += good
            if time.monotonic() > deadline_s or (passed < number and not self._share):
                break
        return passed / len(tests) if self._share else float(passed == len(tests))

    def _verdicts(self, program: str, tests: Sequence[Test]) -> Iterator[bool]:
        """Yield a verdict for each test. All calls share one run, unless the share counts: then each has its own."""
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


def load_examiner(limits: SandboxConfig, *, share: bool) -> Scorer:
    """Make the code scorer. Raises ConfigError if programs cannot be run safely here."""
    return Examiner(open_sandbox(limits), limits, share=share).score
