"""Programs in completions, tests in data files, and what counts as the same output or value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamarl.config import Source
from llamarl.errors import ConfigError, InputError
from llamarl.tasks.datasets import read_examples
from llamarl.tasks.programs import program_in, read_tests, same_output, same_value


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```py\na\n```\nbetter:\n```python3\nb\n```", "b\n"),
        ("```python\na\n```\noutput:\n```text\nb\n```", "a\n"),
        ("```python\nprint(1)", "print(1)"),
        ("```bash\nls\n```", ""),
        ("  ```python\nx\n  ```", "x\n"),
        ("", ""),
    ],
)
def test_the_last_python_block_is_the_program(completion: str, program: str) -> None:
    assert program_in(completion) == program


def test_a_long_text_is_looked_at_from_its_end() -> None:
    assert program_in("```" * 500_000 + "\n```python\nprint(1)\n```").endswith("print(1)\n")


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        (b"1\n2\n", "1\n2", True),
        (b"1 \n2\n\n", "1\n2\n", True),
        (b"1\n\n2", "1\n2", False),
        (b" 1", "1", False),
        (b"", "", True),
        (b"\xff", "\ufffd", True),
        (b"12", "1", False),
    ],
)
def test_output_is_compared_line_by_line(given: bytes, expected: str, same: bool) -> None:
    assert same_output(given, expected) is same


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (True, 1, False),
        (1, True, False),
        (True, True, True),
        (None, None, True),
        (None, False, False),
        ("1", 1, False),
        ("ab", ["a", "b"], False),
        ([1, [2, "x"]], [1, [2, "x"]], True),
        ([1, 2], [1, 2, 3], False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        (10**400, 1.0, False),
        (10**20, 10**20 + 1, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_values_are_the_same_in_kind_and_in_content(given: Any, expected: Any, same: bool) -> None:
    assert same_value(given, expected) is same


def write(folder: Path, *rows: dict[str, Any]) -> Source:
    path = folder / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return Source(kind="code", path=str(path))


def test_rows_bring_their_tests(tmp_path: Path) -> None:
    tests = [{"input": "1", "output": "2"}, {"call": "f", "args": [1], "expected": None}]
    train, _ = read_examples(write(tmp_path, {"prompt": "Add one.", "tests": tests}))
    assert train[0].question == "Add one."
    script, call = read_tests(train[0].answer)
    assert (script.input, script.output) == ("1", "2")
    assert (call.call, call.args, call.expected) == ("f", [1], None)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "x"}, "no field 'tests'"),
        ({"prompt": "x", "tests": []}, "'tests' is empty"),
        ({"prompt": "x", "tests": [{"input": "1"}]}, "number 1 has neither 'output' nor 'call'"),
        ({"prompt": "x", "tests": [{"output": "1"}, {"call": "f"}]}, "number 2 calls f and expects nothing"),
        ({"prompt": "x", "tests": [{"call": "f", "output": "1"}]}, "only one of both"),
        ({"prompt": "x", "tests": [{"stdin": "1"}]}, "stdin"),
        ({"prompt": "x", "tests": "assert f(1)"}, "'tests'"),
        ({"tests": [{"output": "1"}]}, "no field 'prompt'"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, row: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError, match=r"train\.jsonl:1: ") as error:
        read_examples(write(tmp_path, row))
    assert complaint in str(error.value)


def test_examples_can_be_shown_only_where_there_are_solutions(tmp_path: Path) -> None:
    source = write(tmp_path, {"prompt": "x", "solution": "print(1)", "tests": [{"output": "1"}]})
    with pytest.raises(ConfigError, match=r"task\.solution_field"):
        read_examples(replace(source, few_shot=1))
    train, _ = read_examples(replace(source, few_shot=1, solution_field="solution"))
    assert train[0].solution == "print(1)"
