"""`llamarl push`: one commit with a card that is true, private unless asked; what fails leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.brief import BRIEF
from helpers.cli import llamarl
from helpers.stub_hub import StubHub

from llamarl import Job
from llamarl.config import Config, ModelConfig, RewardConfig, TaskConfig
from llamarl.hub.card import make_card, read_run, settings_that_differ
from llamarl.model.checkpoint import check_headers
from llamarl.tasks.statistics import wilson

TOKEN = "hf_anns"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two updates."""
    folder = tmp_path_factory.mktemp("push") / "run"
    Job.load(None, [*BRIEF, "evaluate.every=1", "trainer.lr=1e-4"]).run(folder)
    return folder


@pytest.fixture
def signed_in(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> StubHub:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.token = TOKEN
    return hub


def pushed(hub: StubHub, name: str) -> dict[str, bytes]:
    repo = hub.models[name]
    return repo.commits[repo.refs["main"]]


def metadata(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_the_policy_of_a_run_is_pushed_in_one_commit_and_is_private(
    signed_in: StubHub, run: Path, tmp_path: Path
) -> None:
    done = llamarl("push", run, "ann/sums")
    assert (done.code, done.out) == (0, f"pushed to {signed_in.url}/ann/sums\n"), done.err
    assert "uploading" in done.err and TOKEN not in done.err
    files, policy = pushed(signed_in, "ann/sums"), run / "snapshots" / "2" / "policy"
    assert signed_in.models["ann/sums"].private
    assert len(signed_in.models["ann/sums"].commits) == 2, "the first, empty one of the hub, and ours"
    own = {str(path.relative_to(policy)): path.read_bytes() for path in policy.rglob("*") if path.is_file()}
    assert {name: files[name] for name in own} == own
    assert files.keys() - own.keys() == {"README.md", ".gitattributes"}
    for name, data in own.items():
        (tmp_path / name).write_bytes(data)
    check_headers(tmp_path)


def test_what_was_pushed_can_be_trained_on_by_its_name(signed_in: StubHub, run: Path) -> None:
    llamarl("push", run, "sums")
    done = llamarl("generate", "ann/sums", "--prompt", "1+1=", "--max-new-tokens", 4, "--device", "cpu")
    assert done.code == 0, done.err


def test_the_card_says_what_was_done(signed_in: StubHub, run: Path) -> None:
    llamarl("push", run, "ann/sums", "--public")
    assert not signed_in.models["ann/sums"].private
    card = pushed(signed_in, "ann/sums")["README.md"].decode()
    scores = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert len(scores) == 3
    for row in scores:
        low, high = wilson(row["accuracy"] * 8, 8)
        assert f"| {row['version']} | {row['accuracy']:.3f} | {low:.3f} to {high:.3f} |" in card
    assert "8 problems held out from the training data" in card
    assert "- clean: 8 groups, 8 trained exactly once, 2 updates" in card
    assert "digest of what was trained" in card
    assert "lr: 0.0001" in card and "max_staleness" not in card, "defaults are left out"
    assert "llamarl train job.yaml" in card and "trained with LlamaRL" in card and "torch " in card
    assert metadata(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llamarl", "reinforcement-learning"],
    }


def test_the_settings_of_a_card_make_the_same_job_again(run: Path, tmp_path: Path) -> None:
    card = llamarl("push", run, "ann/sums", "--dry-run").out
    settings = card.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "job.yaml").write_text(settings)
    from llamarl.config.file import load_config

    assert load_config(tmp_path / "job.yaml") == load_config(run / "config.yaml")


def test_base_data_and_license_are_named(signed_in: StubHub, run: Path, tmp_path: Path) -> None:
    signed_in.model("org/base", {"config.json": b"{}"}, license="apache-2.0")
    facts = read_run(run, 2)
    commit = signed_in.models["org/base"].refs["main"]
    config = Config(
        model=ModelConfig(path=f"org/base@{commit}"),
        task=TaskConfig(kind="gsm8k", path="openai/gsm8k@" + "1" * 40, test_path="/home/ann/secret/test.jsonl"),
        reward=RewardConfig(combine={"/home/ann/secret/mine.py:score": 1.0, "numeric": 0.5}),
    )
    from msgspec.structs import replace

    from llamarl.hub.push import push_folder

    facts = replace(facts, config=config)
    policy = run / "snapshots" / "2" / "policy"
    push_folder(
        policy,
        "ann/x",
        public=False,
        base=config.model.path,
        card=lambda *found: make_card(found[0], facts, *found[1:]),
    )
    card = pushed(signed_in, "ann/x")["README.md"].decode()
    found = metadata(card)
    assert (found["base_model"], found["datasets"], found["license"]) == ("org/base", ["openai/gsm8k"], "apache-2.0")
    assert "secret" not in card and "mine.py:score" in card and "test.jsonl" in card
    assert "apache-2.0, that of [org/base@" in card


def test_text_of_settings_cannot_break_out_of_the_card() -> None:
    hostile = Config(task=TaskConfig(kind="dataset", path="x", template="```\n# {prompt}\n````\n---\n<script>"))
    from llamarl.hub.card import _code, _fenced

    block = _fenced(settings_that_differ(hostile))
    fence = block.partition("yaml")[0]
    assert fence not in block[len(fence) : -len(fence)]
    assert _code("a`\n# b\x1b[31m") == "`a' # b\\x1b[31m`"


def test_any_folder_can_be_pushed_such_as_an_adapter(signed_in: StubHub, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    for name, data in (
        ("adapter_config.json", b"{}"),
        ("adapter_model.safetensors", b"x" * 20_000),
        ("README.md", b"# Mine"),
    ):
        (tmp_path / "adapter" / name).write_bytes(data)
    done = llamarl("push", tmp_path / "adapter", "ann/lora")
    assert done.code == 0, done.err
    files = pushed(signed_in, "ann/lora")
    assert files["README.md"] == b"# Mine" and files["adapter_model.safetensors"] == b"x" * 20_000


def test_an_adapter_of_a_run_is_called_one(run: Path) -> None:
    card = make_card("ann/lora", read_run(run, 2), ["adapter_config.json", "adapter_model.safetensors"])
    assert metadata(card)["library_name"] == "peft" and "An adapter of" in card


def test_a_repository_that_others_can_see_is_not_written_unasked(signed_in: StubHub, run: Path) -> None:
    signed_in.model("ann/known", {"a.txt": b"a"})
    done = llamarl("push", run, "ann/known")
    assert done.code == 2 and "push: ann/known is public on the hub; add --public" in done.err
    assert list(pushed(signed_in, "ann/known")) == ["a.txt"]
    assert llamarl("push", run, "ann/known", "--public").code == 0
    assert "config.json" in pushed(signed_in, "ann/known")


def test_an_upload_that_fails_leaves_no_repository(signed_in: StubHub, run: Path) -> None:
    signed_in.full = True
    done = llamarl("push", run, "ann/sums")
    assert done.code == 2 and done.err.splitlines()[-1].startswith("llamarl: push: ann/sums cannot be uploaded")
    assert "Traceback" not in done.err and TOKEN not in done.err
    assert "ann/sums" not in signed_in.models


@pytest.mark.parametrize(
    ("change", "arguments", "reason"),
    [
        ("no token", ["ann/x"], "push: to upload, set HF_TOKEN to a token that may write"),
        ("wrong token", ["ann/x"], "check HF_TOKEN"),
        ("offline", ["ann/x"], "push: HF_HUB_OFFLINE is set"),
        ("no network", ["ann/x"], "push: ann/x cannot be uploaded: http://127.0.0.1:9 cannot be reached"),
        ("", ["ann/x/y"], "push: ann/x/y is no name for the hub"),
        ("", ["ann/x@main"], "push: ann/x@main is no name for the hub"),
        ("", ["ann/x", "--version", 7], "--version 7: "),
        (
            "damaged",
            ["ann/x"],
            "has no whole snapshot: snapshot 2 cannot be used: policy/config.json: its bytes are not",
        ),
        ("no snapshot", ["ann/x"], "has no whole snapshot; a policy is in it"),
        ("gone", ["ann/x"], "no such folder"),
    ],
)
def test_what_cannot_be_pushed_is_one_line(
    signed_in: StubHub,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    arguments: list[object],
    reason: str,
) -> None:
    folder = tmp_path / "copy"
    if change != "gone":
        shutil.copytree(run, folder)
    if change == "no token":
        monkeypatch.delenv("HF_TOKEN")
    if change == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    if change == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if change == "no network":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    if change == "damaged":
        (folder / "snapshots" / "2" / "policy" / "config.json").write_text("{}")
    if change == "no snapshot":
        shutil.rmtree(folder / "snapshots")
    before = set(signed_in.models)
    done = llamarl("push", folder, *arguments)
    assert done.code == 2 and reason in done.err and done.err.count("\n") == 1, done.err
    assert "hf_" not in done.err and set(signed_in.models) == before


def test_a_dry_run_asks_nobody(signed_in: StubHub, run: Path) -> None:
    done = llamarl("push", run, "ann/sums", "--dry-run")
    assert done.code == 0 and done.out.startswith("---\nlibrary_name: transformers\n")
    assert not signed_in.seen
