"""Problems from data files: GSM8K, MATH, SVAMP, and any dataset with prompts and answers, or tests."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamarl.config import DatasetConfig
from llamarl.errors import ConfigError
from llamarl.tasks.custom_scorers import ScorerRequirements
from llamarl.tasks.data_files import BadRow, Row, as_text, field_of, has_field, read_rows, text_field
from llamarl.tasks.dataset_files import find_files
from llamarl.tasks.example_store import ExampleStore
from llamarl.tasks.examples import Example
from llamarl.tasks.extract import boxed
from llamarl.tasks.programs import check_tests
from llamarl.tasks.task import is_held_out
from llamarl.types import Turn

_NOTHING = ScorerRequirements()
_ANSWER = DatasetConfig().answer_field  # which no setting names
_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")  # calculator annotations in GSM8K's solutions
_ROLES = ("system", "user", "assistant")


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
    solution = text_field(row, "solution")
    answer = text_field(row, "answer") if "answer" in row else boxed(solution)
    if not answer:
        raise BadRow(r"no field 'answer', and 'solution' has no \boxed{} to take it from")
    return Example(text_field(row, "problem"), answer, solution)


def _svamp(settings: DatasetConfig, row: Row, needs_answer: bool = True) -> Example:
    """Read a row of SVAMP, in our spelling or in that of the hub, where body and question are two columns."""
    if "Body" in row:
        answer = text_field(row, "Answer")
        body = text_field(row, "Body").strip()
        question = f"{body}{'' if body.endswith(('.', '?', '!', ',')) else '.'} {text_field(row, 'Question').strip()}"
        return Example(question, answer, f"#### {answer}")
    answer = text_field(row, "answer")
    return Example(text_field(row, "question"), answer, f"#### {answer}")


def _rows(settings: DatasetConfig, row: Row, needs_answer: bool = True) -> Example:
    """Read a row of any dataset, by the columns that settings name. A chat that ends with the assistant's message and has no
    answer beside it is answered by that message. Where no scorer needs the answer, a row may have none, unless a setting
    names its column."""
    prompt, answer = _column(row, settings.prompt_field), _column(row, settings.answer_field)
    if answer is None and isinstance(prompt, list) and len(prompt) > 1 and _role(prompt[-1]) == "assistant":
        answer = _turn(prompt[-1], settings.prompt_field).content
        return _make_example(settings, {**row, settings.prompt_field: prompt[:-1]}, answer, answer)
    shown = bool(settings.few_shot) and not settings.solution_field
    named = settings.answer_field != _ANSWER and not has_field(row, settings.answer_field)
    optional = not needs_answer and not shown and not named and answer in (None, "")
    text = "" if optional else text_field(row, settings.answer_field, "task.answer_field")
    return _make_example(settings, row, text, text)


def _code(settings: DatasetConfig, row: Row, needs_answer: bool = True) -> Example:
    """Read a row that has `tests` instead of an answer. A solution is needed only for few-shot prompts."""
    if "tests" not in row:
        raise BadRow(f"no field 'tests'; there are: {', '.join(map(repr, row)) or 'none'}")
    return _make_example(settings, row, check_tests(row["tests"]), "")


def _make_example(settings: DatasetConfig, row: Row, answer: str, solution: str) -> Example:
    """`solution` is the default for rows without a worked solution."""
    solution = text_field(row, settings.solution_field, "task.solution_field") if settings.solution_field else solution
    prompt = _column(row, settings.prompt_field)
    if isinstance(prompt, list):
        turns = tuple(_turn(message, settings.prompt_field) for message in prompt)
        if not turns or turns[-1].role != "user":
            raise BadRow(f"'{settings.prompt_field}' must end with a message of the user")
        return Example(turns[-1].content, answer, solution, turns)
    return Example(text_field(row, settings.prompt_field, "task.prompt_field"), answer, solution)


def _column(row: Row, field: str) -> Any:
    return field_of(row, field) if has_field(row, field) else None


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


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
    "dataset": DatasetKind(_rows, "{prompt}", "exact"),
    "jsonl": DatasetKind(_rows, "{prompt}", "exact"),  # earlier name of "dataset"
    "code": DatasetKind(_code, _PROGRAM, "code"),
}


class Examples(Struct, frozen=True):
    """The problems of a dataset, on their sides."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    test: Sequence[Example]
    notes: tuple[str, ...] = ()  # for the user


def read_examples(settings: DatasetConfig, wanted: ScorerRequirements = _NOTHING) -> Examples:
    """Read all files once. Problems of the test files are never trained on, even if the training files have them too."""
    if settings.kind == "code" and settings.few_shot and not settings.solution_field:
        raise ConfigError("task.solution_field: name the field whose programs task.few_shot is to show")
    files, read = find_files(settings), functools.partial(_read, settings, wanted)
    lengths = _LengthFilter(settings)
    test, tested = ExampleStore(), set[bytes]()
    for example in lengths.kept(read_rows(files.test, read)) if files.test else ():
        test.add(example)
        tested.add(_digest(example.question))
    store, sides = ExampleStore(), (array("q"), array("q"))
    for example in lengths.kept(read_rows(files.train, read)) if files.train else ():
        if _digest(example.question) not in tested:
            sides[is_held_out(example.question, settings.held_out)].append(len(store))
            store.add(example)
    lengths.refuse_if_all(len(store) + len(test))
    train, held_out = map(store.chosen, sides)
    return Examples(train, held_out, test, (*files.notes, *lengths.notes))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class _LengthFilter:
    """Leaves out problems that are too short or too long, and counts them."""

    def __init__(self, settings: DatasetConfig) -> None:
        self._least, self._most = settings.min_chars, settings.max_chars or sys.maxsize
        self._seen = self._left_out = 0

    def kept(self, examples: Iterator[Example]) -> Iterator[Example]:
        for example in examples:
            length = sum(len(turn.content) for turn in example.turns) or len(example.question)
            self._seen += 1
            if self._least <= length <= self._most:
                yield example
            else:
                self._left_out += 1

    @property
    def notes(self) -> tuple[str, ...]:
        told = f"{self._left_out} of {self._seen} problems are left out by task.min_chars and task.max_chars"
        return (told,) if self._left_out else ()

    def refuse_if_all(self, left: int) -> None:
        if self._left_out and not left:
            raise ConfigError(f"task.max_chars: {self.notes[0]}, so none is left")


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
