"""Every format gives the same problems in the same order, a row at a time; damage is told with file and row."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from llamarl.config import TaskConfig
from llamarl.errors import ConfigError, InputError
from llamarl.tasks.data_layout import DataFolder
from llamarl.tasks.example_store import ExampleStore
from llamarl.tasks.examples import Example
from llamarl.tasks.registry import make_single_task
from llamarl.tasks.task import Task

ROWS: list[dict[str, Any]] = [
    {"prompt": f'What is {number}, "plainly"?\nSay it, please: {{}} [] \\ ü {"x" * number}', "answer": str(number)}
    for number in range(40)
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def separated(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["prompt", "answer"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=7)
    return bytes(sink.getvalue().to_pybytes())


def zstd(data: bytes) -> bytes:
    """Two frames, as tools that work in parallel write them."""
    half = len(data) // 2
    return b"".join(bytes(pyarrow.compress(part, codec="zstd", asbytes=True)) for part in (data[:half], data[half:]))


FORMATS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "rows.jsonl": lines,
    "rows.ndjson": lines,
    "rows.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "lines.json": lines,
    "bom.json": lambda rows: b"\xef\xbb\xbf" + json.dumps(rows).encode(),
    "rows.csv": lambda rows: separated(rows, ","),
    "bom.csv": lambda rows: b"\xef\xbb\xbf" + separated(rows, ","),
    "rows.tsv": lambda rows: separated(rows, "\t"),
    "rows.parquet": parquet,
    "rows.jsonl.gz": lambda rows: gzip.compress(lines(rows)),
    "rows.json.gz": lambda rows: gzip.compress(json.dumps(rows).encode()),
    "rows.csv.gz": lambda rows: gzip.compress(separated(rows, ",")),
    "rows.jsonl.zst": lambda rows: zstd(lines(rows)),
    "rows.json.zst": lambda rows: zstd(json.dumps(rows).encode()),
    "rows.csv.zst": lambda rows: zstd(separated(rows, ",")),
}


def task_of(path: Path | str, **settings: Any) -> Task:
    return make_single_task(TaskConfig(kind="dataset", path=str(path), **{"held_out": 0.2, **settings}), 7)


def asked(task: Task) -> list[str]:
    return [task.problem(ordinal).prompt for ordinal in range(2 * len(task.train))]


@pytest.fixture
def plain(tmp_path: Path) -> Task:
    path = tmp_path / "plain" / "rows.jsonl"
    path.parent.mkdir()
    path.write_bytes(lines(ROWS))
    return task_of(path)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_problems_in_the_same_order(tmp_path: Path, plain: Task, name: str) -> None:
    (tmp_path / name).write_bytes(FORMATS[name](ROWS))
    task = task_of(tmp_path / name)
    assert asked(task) == asked(plain)
    assert list(task.held_out) == list(plain.held_out)


@pytest.mark.parametrize("path", ["shards", "shards/*.parquet", "shards/**/*.parquet", "shards/*-0000?-of-*"])
def test_folders_and_patterns_are_read_in_the_order_of_their_names(tmp_path: Path, plain: Task, path: str) -> None:
    (tmp_path / "shards").mkdir()
    for part in (2, 0, 1):
        rows = ROWS[part * 15 : (part + 1) * 15]
        (tmp_path / "shards" / f"train-{part:05}-of-00003.parquet").write_bytes(parquet(rows))
    assert asked(task_of(tmp_path / path)) == asked(plain)


def test_a_long_list_in_json_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Task) -> None:
    monkeypatch.setattr("llamarl.tasks.data_files._CHUNK_CHARS", 16)
    for name in ("rows.json", "lines.json", "rows.jsonl", "rows.jsonl.zst"):
        (tmp_path / name).write_bytes(FORMATS[name](ROWS))
        assert asked(task_of(tmp_path / name)) == asked(plain)


def test_many_examples_lie_on_disk_and_come_back_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store, examples = ExampleStore(in_memory=1000), [Example(f"q{i}" * 9, str(i), "s") for i in range(300)]
    for number, example in enumerate(examples):
        store.add(example)
        assert store[number] == store[-1] == example
    assert store.on_disk and len(store._kept) <= 1000
    assert list(store) == examples and list(store[5:290:7]) == examples[5:290:7]
    with pytest.raises(IndexError):
        store[300]
    assert not list(tmp_path.iterdir())


def test_a_task_holds_no_row_in_memory_beyond_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Task
) -> None:
    monkeypatch.setattr("llamarl.tasks.example_store.IN_MEMORY_BYTES", 500)
    monkeypatch.setattr(ExampleStore.__init__, "__defaults__", (500,))
    (tmp_path / "rows.csv").write_bytes(FORMATS["rows.csv"](ROWS))
    assert asked(task_of(tmp_path / "rows.csv")) == asked(plain)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.jsonl.gz", gzip.compress(lines(ROWS))[:-20], "a.jsonl.gz: is damaged or cut short"),
        ("a.jsonl.gz", b"not packed", "a.jsonl.gz: is damaged or cut short"),
        ("a.jsonl.zst", zstd(lines(ROWS))[:-9], "a.jsonl.zst: is damaged or cut short"),
        ("a.csv.zst", b"not packed at all", "a.csv.zst: is damaged or cut short"),
        ("a.parquet", parquet(ROWS)[:-30], "a.parquet: not a Parquet file"),
        ("a.parquet", b"PAR1", "a.parquet: not a Parquet file"),
        ("a.parquet", b"", "a.parquet: not a Parquet file"),
        (
            "a.parquet",
            parquet([{"question": "q", "answer": 1}]),
            "a.parquet:1: no field 'prompt'; there are: 'question', 'answer'",
        ),
        ("a.json", b'[{"prompt": "p", "answer": 1}, {"prompt": "p"', "a.json:2: not JSON"),
        ("a.json", b'[{"prompt": "p", "answer": 1}', "a.json:2: not JSON: the file ends in the middle of its list"),
        ("a.json", b'[{"prompt": "p", "answer": 1} {"prompt": "p"}]', "a.json:2: not a JSON object"),
        ("a.json", b'[{"prompt": "p", "answer": 1}, 3]', "a.json:2: not a JSON object"),
        ("a.json", b'{"prompt": "p", "answer": NaN}', "a.json:1: not JSON"),
        ("a.json", b'"text"', "a.json:1: not a JSON object"),
        ("a.json", b"[{" * 99_999, "a.json:1: not JSON"),
        ("a.json", b"[]", "a.json: no rows"),
        ("a.json", b"", "a.json: no rows"),
        ("a.json", b'[{"prompt": "\xff"}]', "a.json: is not UTF-8 text"),
        ("a.csv", b"prompt,answer\np\n", "a.csv:2: has 1 values, and the first line names 2 columns"),
        ("a.csv", b"prompt,prompt\np,1\n", "a.csv:1: the first line names a column twice"),
        ("a.csv", b'prompt,answer\n"p,1\n', "a.csv:2: not CSV: unexpected end of data"),
        ("a.csv", b"prompt,answer\n\xff,1\n", "a.csv: is not UTF-8 text"),
        ("a.csv", b"q,answer\np,1\n", "a.csv:2: no field 'prompt'; there are: 'q', 'answer'"),
        ("a.csv", b"", "a.csv: no rows"),
    ],
)
def test_damage_is_one_line_with_file_and_row(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError) as refused:
        task_of(tmp_path / name)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_without_pyarrow_one_line_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"to read this format: pip install 'llamarl\[data\]'"):
        task_of(tmp_path / name)


def test_messages_that_end_with_the_answer_are_split(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    (tmp_path / "a.parquet").write_bytes(parquet([{"messages": chat}]))
    problem = task_of(tmp_path / "a.parquet", prompt_field="messages", held_out=1e-9).problem(0)
    assert (problem.answer, [turn.content for turn in problem.turns]) == ("4", ["2+2?"])


def test_a_column_may_lie_inside_of_another(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"style": "rule", "ground_truth": "4"}}
    (tmp_path / "a.parquet").write_bytes(parquet([row]))
    problem = task_of(tmp_path / "a.parquet", answer_field="reward_model.ground_truth", held_out=1e-9).problem(0)
    assert problem.answer == "4"
    with pytest.raises(InputError, match=r"a\.parquet:1: no field 'reward_model\.truth'"):
        task_of(tmp_path / "a.parquet", answer_field="reward_model.truth")


def test_problems_are_left_out_by_length_and_that_is_said(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * length, "answer": 1} for length in (1, 5, 9, 20)]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    task = task_of(tmp_path / "a.jsonl", min_chars=4, max_chars=9, held_out=1e-9)
    assert sorted(len(problem.prompt) for problem in task.train) == [5, 9]
    assert task.notes == ("2 of 4 problems are left out by task.min_chars and task.max_chars",)
    with pytest.raises(ConfigError, match=r"task\.max_chars: 4 of 4 problems are left out .* so none is left"):
        task_of(tmp_path / "a.jsonl", min_chars=100)
    with pytest.raises(ConfigError, match=r"task\.max_chars: is below min_chars=5"):
        TaskConfig(kind="dataset", path="x", min_chars=5, max_chars=4)


def test_settings_for_folders_are_refused_for_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    for setting in ({"split": "dev"}, {"config": "main"}, {"test_split": "dev"}):
        with pytest.raises(ConfigError, match=r"cannot take effect, since task\.path names files"):
            task_of(tmp_path / "a.jsonl", **setting)


GSM8K = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: {train: [socratic/train-*], test: socratic/test-*}
---
# GSM8K
"""
FILES = [f"{config}/{split}-00000-of-00001.parquet" for config in ("main", "socratic") for split in ("train", "test")]


def test_a_readme_says_which_files_hold_a_split() -> None:
    folder = DataFolder("openai/gsm8k", [*FILES, "README.md"], GSM8K)
    assert folder.files("train", "main") == ["main/train-00000-of-00001.parquet"]
    assert folder.files("test", "socratic") == ["socratic/test-00000-of-00001.parquet"]
    assert folder.files("dev", "main") == []
    with pytest.raises(
        ConfigError, match=r"task\.config: openai/gsm8k has several configs; name one of: main, socratic"
    ):
        folder.files("train")
    with pytest.raises(
        ConfigError, match=r"task\.config: openai/gsm8k has no config 'mian'; there are: main, socratic"
    ):
        folder.files("train", "mian")
    with pytest.raises(InputError, match=r"task\.split: openai/gsm8k has no split 'dev'; there are: train, test"):
        folder.check("dev", "main")


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        (["train.jsonl", "test.jsonl", "train_socratic.jsonl"], ["train.jsonl"], ["test.jsonl"]),
        (["data/train-0.parquet", "data/train-1.parquet"], ["data/train-0.parquet", "data/train-1.parquet"], []),
        (["training/a.csv", "eval/b.csv"], ["training/a.csv"], ["eval/b.csv"]),
        (["a.json", "b.json", "dataset_infos.json", ".git/x.json"], ["a.json", "b.json"], []),
        (["restrained.csv", "contest.csv"], ["contest.csv", "restrained.csv"], []),
        (["test.jsonl"], [], ["test.jsonl"]),
        (["train.jsonl.gz", "test.jsonl.zst"], ["train.jsonl.gz"], ["test.jsonl.zst"]),
    ],
)
def test_without_a_readme_names_of_files_tell_the_split(names: list[str], train: list[str], test: list[str]) -> None:
    folder = DataFolder("somewhere", names)
    assert (folder.files("train"), folder.files("test")) == (train, test)


def test_a_config_without_a_readme_is_a_folder() -> None:
    folder = DataFolder("somewhere", ["easy/train.jsonl", "hard/train.jsonl"])
    assert folder.files("train", "hard") == ["hard/train.jsonl"]
    with pytest.raises(ConfigError, match=r"no config 'odd'; its data files are: easy/train\.jsonl"):
        folder.files("train", "odd")


@pytest.mark.parametrize(
    "readme", ["---\nconfigs: 3\n---\n", "---\n: [\n---\n", "---\n- a\n---\n", "no metadata", "---\n"]
)
def test_a_readme_that_says_nothing_is_no_hindrance(readme: str) -> None:
    assert DataFolder("somewhere", ["train.jsonl"], readme).files("train") == ["train.jsonl"]


def test_one_config_of_several_may_be_the_default() -> None:
    configs = "- {config_name: a, data_files: a.csv}\n- {config_name: b, data_files: b.csv, default: true}"
    readme = f"---\nconfigs:\n{configs}\n---\n"
    folder = DataFolder("somewhere", ["a.csv", "b.csv"], readme)
    assert (folder.files("train"), folder.files("train", "a"), folder.files("train", "b")) == (
        ["b.csv"],
        ["a.csv"],
        ["b.csv"],
    )
