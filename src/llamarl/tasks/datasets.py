"""Problems from data files: GSM8K, MATH, SVAMP, and any JSON-lines file with prompts and answers, or tests."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamarl.config import DatasetConfig
from llamarl.errors import ConfigError, InputError
from llamarl.tasks.custom_scorers import ScorerRequirements
from llamarl.tasks.data_files import BadRow, Row, as_text, read_rows, text_field
from llamarl.tasks.programs import check_tests
from llamarl.types import Turn

_NOTHING = ScorerRequirements()
_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")  # calculator annotations in GSM8K's solutions
_ROLES = ("system", "user", "assistant")


class Example(Struct, frozen=True):
    """One row of data: question, answer and worked solution."""

    question: str
    answer: str
    solution: str
    turns: tuple[Turn, ...] = ()
    columns: dict[str, Any] = {}  # further columns that the user's own scorers need


class DatasetKind(Struct, frozen=True):
    """What belongs to a kind of data: its reader, called as read(settings, row, needs_answer), the prompt template, the
    scorer."""

    read: Callable[..., Example | None]
    template: str
    scorer: str


def _gsm8k(settings: DatasetConfig, row: Row, needs_answer: bool = True) -> Example:
    solution = text_field(row, "answer")
    _, found, answer = solution.rpartition("####")
    if not found or not answer.strip():
        raise BadRow("'answer' has no final answer after ####")
    return Example(text_field(row, "question"), answer.strip().replace(",", ""), _CALCULATOR.sub("", solution))


def _math(settings: DatasetConfig, row: Row, needs_answer: bool = True) -> Example | None:
    """Read a row of MATH. Two of its problems have an empty box as their answer and are left out."""
    if row.get("answer") == "":
        return None
    return Example(text_field(row, "problem"), text_field(row, "answer"), text_field(row, "solution"))


def _svamp(settings: DatasetConfig, row: Row, needs_answer: bool = True) -> Example:
    answer = text_field(row, "answer")
    return Example(text_field(row, "question"), answer, f"#### {answer}")


def _jsonl(settings: DatasetConfig, row: Row, needs_answer: bool = True) -> Example:
    shown = bool(settings.few_shot) and not settings.solution_field
    optional = not needs_answer and not shown and row.get(settings.answer_field) in (None, "")
    answer = "" if optional else text_field(row, settings.answer_field)
    return _make_example(settings, row, answer, answer)


def _code(settings: DatasetConfig, row: Row, needs_answer: bool = True) -> Example:
    """Read a row that has `tests` instead of an answer. A solution is needed only for few-shot prompts."""
    if "tests" not in row:
        raise BadRow(f"no field 'tests'; there are: {', '.join(map(repr, row)) or 'none'}")
    return _make_example(settings, row, check_tests(row["tests"]), "")


def _make_example(settings: DatasetConfig, row: Row, answer: str, solution: str) -> Example:
    """`solution` is the default for rows without a worked solution."""
    solution = text_field(row, settings.solution_field) if settings.solution_field else solution
    prompt = row.get(settings.prompt_field)
    if isinstance(prompt, list):
        turns = tuple(_turn(message, settings.prompt_field) for message in prompt)
        if not turns or turns[-1].role != "user":
            raise BadRow(f"'{settings.prompt_field}' must end with a message of the user")
        return Example(turns[-1].content, answer, solution, turns)
    return Example(text_field(row, settings.prompt_field), answer, solution)


def _turn(message: Any, field: str) -> Turn:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise BadRow(f"'{field}' must be text or a list of {{role, content}} with roles {', '.join(_ROLES)}")
    return Turn(message["role"], as_text(message.get("content"), f"{field}.content"))


_WORD_PROBLEM = "Question: {prompt}\nWork it out step by step and end with a line #### and the number.\nAnswer:"
_PROGRAM = "{prompt}\nAnswer with one Python program in a ```python block.\n"
_COMPETITION = "Problem: {prompt}\nWork it out step by step and put the final answer in \\boxed{}.\nSolution:"
KINDS: dict[str, DatasetKind] = {
    "gsm8k": DatasetKind(_gsm8k, _WORD_PROBLEM, "numeric"),
    "math": DatasetKind(_math, _COMPETITION, "math"),
    "svamp": DatasetKind(_svamp, _WORD_PROBLEM, "numeric"),
    "jsonl": DatasetKind(_jsonl, "{prompt}", "exact"),
    "code": DatasetKind(_code, _PROGRAM, "code"),
}


def read_examples(
    settings: DatasetConfig, wanted: ScorerRequirements = _NOTHING
) -> tuple[list[Example], list[Example]]:
    """Return (training, test). Problems of the test file are never trained on, even if the training file has them too."""
    if settings.kind == "code" and settings.few_shot and not settings.solution_field:
        raise ConfigError("task.solution_field: name the field whose programs task.few_shot is to show")
    train_path, test_path = _files(settings)
    read = functools.partial(_read, settings, wanted)
    test = read_rows(test_path, read) if test_path else []
    tested = {example.question for example in test}
    rows = read_rows(train_path, read) if train_path else []
    return [row for row in rows if row.question not in tested], test


def _read(settings: DatasetConfig, wanted: ScorerRequirements, row: Row) -> Example | None:
    """Read a file with the columns that scorers need. Columns behind prompt and answer are added only if named."""
    example = KINDS[settings.kind].read(settings, row, wanted.answer)
    columns = wanted.of(row, beside=(settings.prompt_field, settings.answer_field, "tests"))
    if example is None or not columns:
        return example
    try:
        msgspec.msgpack.encode(columns)
    except (OverflowError, msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise BadRow(f"a column that a scorer asks for cannot be carried: {error}") from None
    return replace(example, columns=columns)


def _files(settings: DatasetConfig) -> tuple[Path | None, Path | None]:
    if not settings.path:
        raise ConfigError(
            f"task.path: name the file, or the folder with train.jsonl, that {settings.kind} is read from; "
            "nothing is downloaded"
        )
    path = Path(settings.path).expanduser()
    if not path.exists():
        raise InputError(f"task.path: no file or folder {path}")
    train = path if path.is_file() else path / "train.jsonl"
    test = Path(settings.test_path).expanduser() if settings.test_path else train.with_name("test.jsonl")
    if settings.test_path and not test.is_file():
        raise InputError(f"task.test_path: no file {test}")
    found = tuple(file if file.is_file() else None for file in (train, test))
    if found == (None, None):
        raise InputError(f"task.path: {path} holds neither train.jsonl nor test.jsonl")
    return (found[0], None) if train == test else (found[0], found[1])
