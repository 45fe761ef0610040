"""Data by name: the same rules for a dataset on the hub as for a folder, and only the files that are read are fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers.cli import llamarl
from helpers.stub_hub import StubHub

from llamarl.config import TaskConfig
from llamarl.errors import InputError
from llamarl.hub.datasets import BUILT_IN, fetch_dataset
from llamarl.tasks.registry import make_single_task

DATA = Path(__file__).parents[2] / "data"
MAIN_AND_SOCRATIC = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


@pytest.fixture
def gsm8k(hub: StubHub) -> StubHub:
    files = {
        "README.md": MAIN_AND_SOCRATIC,
        "main/train-00000-of-00001.parquet": parquet(rows_of(DATA / "gsm8k" / "train.jsonl")),
        "main/test-00000-of-00001.parquet": parquet(rows_of(DATA / "gsm8k" / "test.jsonl")),
        "socratic/train-00000-of-00001.parquet": b"not read",
    }
    hub.dataset("openai/gsm8k", files)
    return hub


def test_gsm8k_works_by_its_kind_alone(gsm8k: StubHub) -> None:
    settings = fetch_dataset(TaskConfig(kind="gsm8k"))
    assert settings.path == f"openai/gsm8k@{gsm8k.datasets['openai/gsm8k'].refs['main']}"
    assert settings.config == "main"
    named, local = (
        make_single_task(settings, 0),
        make_single_task(TaskConfig(kind="gsm8k", path=str(DATA / "gsm8k")), 0),
    )
    assert list(named.train) == list(local.train) and list(named.test) == list(local.test)
    assert len(gsm8k.downloads()) == 3, "README and both files of the config"


def test_math_and_svamp_work_by_their_kinds_alone(hub: StubHub) -> None:
    math = rows_of(DATA / "math" / "train.jsonl")
    bare = [{key: row[key] for key in ("problem", "level", "solution", "type")} for row in math]
    configs = "- {config_name: algebra, data_files: algebra/*}\n- {config_name: default, data_files: data/*}"
    readme = f"---\nconfigs:\n{configs}\n---\n".encode()
    hub.dataset("DigitalLearningGmbH/MATH-lighteval", {"README.md": readme, "data/train-0.parquet": parquet(bare)})
    hub.dataset("HuggingFaceH4/MATH-500", {"test.jsonl": "".join(json.dumps(row) + "\n" for row in math[:3]).encode()})
    task = make_single_task(fetch_dataset(TaskConfig(kind="math", held_out=1e-9)), 0)
    local = make_single_task(TaskConfig(kind="math", path=str(DATA / "math"), held_out=1e-9), 0)
    answers = {problem.prompt: problem.answer for problem in local.train}
    assert len(task.test) == 3 and len(task.train) == len(local.train) - 3
    assert all(answers[problem.prompt] == problem.answer for problem in task.train), (
        "taken from the box of the solution"
    )

    svamp = [
        {"ID": "x", "Body": "Ann has 3 apples", "Question": "How many?", "Answer": 3.0, "Equation": "", "Type": "add"}
    ]
    hub.dataset("ChilleD/SVAMP", {"data/train-00000-of-00001.parquet": parquet(svamp)})
    problem = make_single_task(fetch_dataset(TaskConfig(kind="svamp", held_out=1e-9)), 0).problem(0)
    assert "Ann has 3 apples. How many?" in problem.prompt and problem.answer == "3"
    assert BUILT_IN.keys() == {"gsm8k", "math", "svamp"}


def test_a_named_task_is_evaluated_from_the_command_line(gsm8k: StubHub) -> None:
    small = ["generator.max_prompt_tokens=128", "generator.max_new_tokens=4", "task.template='{prompt}'"]
    done = llamarl("eval", "org/tiny", "gsm8k", *small, "--problems", 3, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["samples"] == 1


def test_config_split_and_revision_are_settings(gsm8k: StubHub) -> None:
    repo = gsm8k.datasets["openai/gsm8k"]
    old = repo.refs["main"]
    repo.commit({"other.txt": b""})
    chosen = TaskConfig(kind="gsm8k", path=f"openai/gsm8k@{old}", config="main", split="test", test_split="train")
    task = make_single_task(fetch_dataset(chosen), 0)
    assert len(task.train) + len(task.held_out) == len(rows_of(DATA / "gsm8k" / "test.jsonl"))


def test_offline_a_dataset_comes_from_the_cache(gsm8k: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch_dataset(TaskConfig(kind="gsm8k"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(gsm8k.seen)
    assert fetch_dataset(TaskConfig(kind="gsm8k")) == first
    assert len(gsm8k.seen) == asked


def test_only_the_split_that_is_read_is_fetched(hub: StubHub) -> None:
    files = {
        f"{split}.jsonl": b'{"prompt": "%s", "answer": 1}\n' % split.encode()
        for split in ("train", "test", "validation")
    }
    hub.dataset("org/data", {**files, "pictures.parquet": b"large", "audio.zip": b"large"})
    fetch_dataset(TaskConfig(kind="dataset", path="org/data", split="validation"))
    assert hub.downloads() == ["test.jsonl", "validation.jsonl"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["task.path=org/no"], "task.path: no file or folder org/no here, and the hub has no dataset org/no"),
        (["task.path=org/gated"], "is gated: accept its terms at http://127.0.0.1"),
        (["task.path=org/data@v7"], "task.path: org/data has no branch, tag or commit 'v7'"),
        (
            ["task.path=org/data", "task.split=dev"],
            "task.split: org/data has no split 'dev'; its data files are: train.jsonl",
        ),
        (["task.path=org/data", "task.config=hard"], "task.config: org/data has no config 'hard'"),
        (["task.path=org/data", "task.prompt_field=q"], "train.jsonl:1: no field 'q'; there are: 'prompt', 'answer'"),
        (["task.path=org/data", "task.answer_field=a"], "train.jsonl:1: no field 'a'; there are: 'prompt', 'answer'"),
        (["task.path=org/script"], "is made by a script of its own, which is not run"),
        (["task.path=org/pictures"], "org/pictures has no files that end with .jsonl"),
        (["task.path=org/torn"], "train.parquet: not a Parquet file"),
        (["task.path=data/none.jsonl"], "task.path: no file or folder data/none.jsonl"),
        (["task.path=data/*.parquet"], "task.path: no file or folder data/*.parquet"),
        (["task.path=org/data", "task.test_path=org/none"], "task.test_path: no file or folder org/none here"),
    ],
)
def test_bad_data_are_one_line_with_exit_code_2(hub: StubHub, tmp_path: Path, settings: list[str], reason: str) -> None:
    row = b'{"prompt": "1+1=", "answer": 2}\n'
    hub.dataset("org/data", {"train.jsonl": row})
    hub.dataset("org/gated", {"train.jsonl": row}, gated=True)
    hub.dataset("org/script", {"script.py": b"print()"})
    hub.dataset("org/pictures", {"a.png": b"x"})
    hub.dataset("org/torn", {"train.parquet": parquet([{"prompt": "p", "answer": 1}])[:-20]})
    run = tmp_path / "run"
    done = llamarl("train", "task=dataset", *settings, "engine=inline", "--quiet", "--run", run)
    assert (done.code, done.out) == (2, "")
    assert reason in done.err and done.err.count("\n") == 1 and not run.exists()


def test_a_dataset_whose_download_breaks_off_is_not_read(hub: StubHub, cache: Path) -> None:
    hub.dataset("org/data", {"train.jsonl": b'{"prompt": "p", "answer": 1}\n' * 999})
    hub.cut_short = "train.jsonl"
    with pytest.raises(InputError, match=r"the download of org/data@.* broke off"):
        fetch_dataset(TaskConfig(kind="dataset", path="org/data"))
    assert not list(cache.rglob("train.jsonl")) and not list(cache.rglob("*incomplete*"))
