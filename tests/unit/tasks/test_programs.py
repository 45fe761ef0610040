"""Programs in completions, tests in data files, and what counts as the same output or value."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamarl.config import DatasetConfig
from llamarl.errors import ConfigError, InputError
from llamarl.tasks.code_blocks import fenced_program, program_in
from llamarl.tasks.data_files import BadRow
from llamarl.tasks.datasets import read_examples
from llamarl.tasks.programs import read_tests, same_output, same_value


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
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("~~~\nprint('```')\n~~~", "print('```')\n"),
        ("````python\nx = (\n```\n)\n````", "x = (\n```\n)\n"),
        ("1. So:\n\n    ```python\n    if a:\n        b\n    ```", "if a:\n    b\n"),
        ("- So:\n\t```python\n\tif a:\n\t\tb\n\t```", "if a:\n    b\n"),
        ("```{.python}\na\n```", "a\n"),
        ("```Python title='x'\na\n```", "a\n"),
    ],
)
def test_the_last_python_block_is_the_program(completion: str, program: str) -> None:
    assert program_in(completion) == program


PROGRAM = "def f(n):\n    return n + 1\n"
BEHIND = {
    "a use": "```python\nprint(f(3))\n```",
    "a use with its own names": "```python\nimport math\nfor n in range(3):\n    print(math.pi, f(n))\n```",
    "a test": "```python\nimport unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert f(1) == 2\n```",
    "a test that imports it": "```python\nfrom solution import f\nassert f(1) == 2\n```",
    "a session": "```python\n>>> f(3)\n4\n```",
    "its output": "```\n4\n```",
    "words": "```\nit prints 4\n```",
    "a command": "```bash\npython program.py < input\n```",
    "a comment": "```python\n# prints 4\n```",
}


@pytest.mark.parametrize("language", ["python", ""])
@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND.keys())
def test_what_follows_a_program_is_not_taken_for_it(behind: str, language: str) -> None:
    behind = behind if language else behind.replace("```python", "```")
    assert program_in(f"So:\n```{language}\n{PROGRAM}```\nand then\n{behind}\n") == PROGRAM


@pytest.mark.parametrize(
    "later",
    ["def f(n):\n    return n + 2\n", "print(int(input()) + 1)\n", "from math import gcd as f\nprint(f(2, 4))\n"],
)
def test_a_later_program_takes_the_place_of_an_earlier(later: str) -> None:
    assert program_in(f"```python\n{PROGRAM}```\nBetter:\n```python\n{later}```") == later


def test_a_program_that_is_broken_is_still_the_last_one() -> None:
    assert program_in(f"```python\n{PROGRAM}```\n```python\ndef f(:\n```") == "def f(:\n"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (f"<think>\n```python\nwrong\n```\n</think>\n```python\n{PROGRAM}```", PROGRAM),
        ("<think>\n```python\nprint(1)\n```\n</think>\nI cannot.", "\nI cannot."),
        ("```python\nprint(1)\n```\n</think>print(2)", "print(2)"),
        ("<think>\n```python\nprint(1)\n```\n", ""),
        ("print('<think>')", "print('<think>')"),
    ],
)
def test_a_thought_is_not_the_answer(completion: str, program: str) -> None:
    assert program_in(completion) == program


def test_a_tool_is_given_the_last_block_as_it_is() -> None:
    assert fenced_program(f"```python\n{PROGRAM}```\n```python\nprint(f(1))\n```") == "print(f(1))\n"


@pytest.mark.parametrize(
    "nasty", ["(" * 100_000, "-" * 100_000 + "1", "f(" * 5000, "\0", "a." * 50_000, "if 1:\n" * 2000]
)
def test_odd_programs_are_read_without_an_error(nasty: str) -> None:
    assert program_in(f"```python\n{PROGRAM}```\n```python\n{nasty}\n```") in (PROGRAM, nasty + "\n")


@pytest.mark.parametrize(
    "part", ["```python\nf(1)\n```\n", "```python\ndef g{}(): f(1)\n```\n", "~~~\n", "```\n1\n```\n"]
)
def test_many_blocks_take_little_time(part: str) -> None:
    text = f"```python\n{PROGRAM}```\n" + "".join(part.replace("{}", str(n)) for n in range(200_000 // len(part)))
    start_s = time.process_time()
    program_in(text)
    assert time.process_time() - start_s < 2.0


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
        (0, 1e-10, False),
        (0.0, 1e-300, False),
        (2e-10, 1e-10, False),
        (1e-10 * (1 + 1e-12), 1e-10, True),
        (1e-10, 0, False),
        (1e-10, 0.0, False),
        (0.1 + 0.2 - 0.3, 0.0, True),
        (-0.0, 0, True),
        (1, 0, False),
        (1e20, 1e20 + 1e12, False),
    ],
)
def test_values_are_the_same_in_kind_and_in_content(given: Any, expected: Any, same: bool) -> None:
    assert same_value(given, expected) is same


def write(folder: Path, *rows: dict[str, Any]) -> DatasetConfig:
    path = folder / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return DatasetConfig(kind="code", path=str(path), held_out=1e-9)


def test_rows_bring_their_tests(tmp_path: Path) -> None:
    tests = [{"input": "1", "output": "2"}, {"call": "f", "args": [1], "expected": None}]
    train = read_examples(write(tmp_path, {"prompt": "Add one.", "tests": tests})).train
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
        ({"prompt": "x", "tests": [{}]}, "number 1 has neither 'output' nor 'call'"),
        ({"prompt": "x", "tests": "[{}]"}, "number 1 has neither 'output' nor 'call'"),
        ({"prompt": "x", "tests": [{"output": "1", "args": [1]}]}, "no 'call'"),
        ({"prompt": "x", "tests": [{"output": "1", "expected": 1}]}, "no 'call'"),
        ({"tests": [{"output": "1"}]}, "no field 'prompt'"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, row: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError, match=r"train\.jsonl:1: ") as error:
        read_examples(write(tmp_path, row))
    assert complaint in str(error.value)


@pytest.mark.parametrize("text", ["[{}]", "[]", "{}", "", "[1]", '[{"call": "f"}]'])
def test_tests_that_ask_nothing_are_refused_wherever_they_are_read(text: str) -> None:
    with pytest.raises(BadRow):
        read_tests(text)


def test_examples_can_be_shown_only_where_there_are_solutions(tmp_path: Path) -> None:
    source = write(tmp_path, {"prompt": "x", "solution": "print(1)", "tests": [{"output": "1"}]})
    with pytest.raises(ConfigError, match=r"task\.solution_field"):
        read_examples(replace(source, few_shot=1))
    train = read_examples(replace(source, few_shot=1, solution_field="solution")).train
    assert train[0].solution == "print(1)"
