"""Names in a job's settings: each is pinned to a commit before anything starts, and a resumed run keeps its commits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.brief import BRIEF
from helpers.cli import llamarl
from helpers.stub_hub import StubHub

from llamarl import Job
from llamarl.config import Config, MixturePart, ModelConfig, TaskConfig
from llamarl.config.file import load_config, parse_config
from llamarl.config.paths import with_absolute_paths
from llamarl.errors import InputError
from llamarl.hub.resolve import with_commits_of, with_hub_files
from llamarl.types import Problem


def rows(*found: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in found).encode()


SUMS = [{"q": f"{a}+{b}=", "a": a + b} for a in range(8) for b in range(8)]


def test_a_run_writes_the_commit_down_and_goes_on_with_it_after_the_branch_moved(
    hub: StubHub, tmp_path: Path, tiny_files: dict[str, bytes]
) -> None:
    commit, run = hub.models["org/tiny"].refs["main"], tmp_path / "run"
    Job.load(None, [*BRIEF, "model.path=org/tiny", "schedule.updates=1"]).run(run)
    assert load_config(run / "config.yaml").model.path == f"org/tiny@{commit}"
    hub.models["org/tiny"].commit({**tiny_files, "config.json": b"{}"})  # main is of no use any more
    asked = len(hub.seen)
    done = llamarl("train", "model.path=org/tiny", *BRIEF, "--run", run, "--resume")
    assert done.code == 0, done.err
    assert len(hub.seen) == asked, "the commit of the run was here"
    assert load_config(run / "config.yaml").model.path == f"org/tiny@{commit}"
    assert llamarl("audit", run).code == 0
    refused = llamarl("train", "model.path=org/tiny@main", "schedule.updates=3", *BRIEF[:1], "--run", run, "--resume")
    assert refused.code == 2


def test_everything_that_names_a_model_is_resolved(hub: StubHub) -> None:
    commit = hub.models["org/tiny"].refs["main"]
    raw = {
        "model": {"path": "org/tiny"},
        "reference": {"model": "org/tiny"},
        "reward_model": {"path": "org/tiny"},
        "algo": {"reference_kl": 0.1},
    }
    found = with_hub_files(parse_config(raw))
    assert {found.model.path, found.reference.model, found.reward_model.path} == {f"org/tiny@{commit}"}
    assert found.model_folder == found.reference_folder
    assert with_absolute_paths(found) == found, "a name is no path"


def test_a_job_trains_on_a_named_dataset(hub: StubHub, tmp_path: Path) -> None:
    repo = hub.dataset("org/sums", {"train.jsonl": rows(*SUMS), "test.jsonl": rows(*SUMS[:8]), "README.md": b"# Sums"})
    settings = [
        "task=dataset",
        "task.path=org/sums",
        "task.prompt_field=q",
        "task.answer_field=a",
        "evaluate.split=test",
    ]
    summary = Job.load(None, [*BRIEF, *settings, "model.path=org/tiny"]).run(tmp_path / "run")
    assert (summary.outcome, summary.updates, summary.groups_dropped) == ("finished", 2, 0)
    commit = repo.refs["main"]
    assert load_config(tmp_path / "run" / "config.yaml").task.path == f"org/sums@{commit}"


def test_the_parts_of_a_mixture_are_resolved_too(hub: StubHub) -> None:
    hub.dataset("org/one", {"train.jsonl": rows({"prompt": "p", "answer": 1})})
    hub.dataset("org/two", {"data/train.csv": b"prompt,answer\np,1\n", "data/test.csv": b"prompt,answer\nq,1\n"})
    parts = tuple(MixturePart(kind="dataset", path=path) for path in ("org/one", "org/two"))
    found = with_hub_files(Config(task=TaskConfig(kind="mixture", parts=parts)))
    assert [part.path.partition("@")[0] for part in found.task.parts] == ["org/one", "org/two"]
    assert all(len(part.path.partition("@")[2]) == 40 for part in found.task.parts)


def test_a_mistyped_part_is_named(hub: StubHub) -> None:
    with pytest.raises(
        InputError, match=r"task\.parts\[0\]\.path: no file or folder org/no here, and the hub has no dataset"
    ):
        with_hub_files(Config(task=TaskConfig(kind="mixture", parts=(MixturePart(kind="dataset", path="org/no"),))))


def test_a_resumed_run_keeps_its_commits_unless_another_revision_is_asked_for() -> None:
    old, new = "a/b@" + "1" * 40, "a/b@" + "2" * 40
    before = Config(
        model=ModelConfig(path=old), task=TaskConfig(kind="gsm8k", path="openai/gsm8k@" + "3" * 40, config="main")
    )
    now = Config(model=ModelConfig(path="a/b"), task=TaskConfig(kind="gsm8k"))
    assert with_commits_of(before, now) == before
    for other in (new, "a/b@v2", "a/c", "tiny"):
        assert with_commits_of(before, Config(model=ModelConfig(path=other))).model.path == other


def test_a_task_from_python_needs_no_data(hub: StubHub, tmp_path: Path) -> None:
    class Sums:
        def problem(self, ordinal: int) -> Problem:
            return Problem("1+1=", "2", scorer="exact")

        def evaluation(self, count: int, split: str = "held_out") -> list[Problem]:
            return [self.problem(0)] * min(count, 1)

    config = load_config(None, [*BRIEF, "task=gsm8k", "model.path=org/tiny"])
    assert Job(config, task=Sums()).config.task.kind == "given"
    assert not any("datasets" in line for line in hub.seen)
