"""Models by name: the real client, a hub on loopback. What is fetched is whole and pinned; the rest is told in one line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import llamarl
from helpers.disk import Disk, watching
from helpers.stub_hub import StubHub

from llamarl import LLM, Sampling
from llamarl.config import Config, model_folder
from llamarl.config.hub_names import HubName, hub_cache, name_on_hub, parse_hub_name
from llamarl.errors import InputError
from llamarl.hub.models import fetch_model, fetch_model_config

NEEDED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
SECRET = "hf_averysecrettoken"


def commit_of(hub: StubHub, name: str = "org/tiny") -> str:
    return hub.models[name].refs["main"]


def left_in(cache: Path) -> list[str]:
    """What is not whole in the cache."""
    found = [path.name for path in cache.rglob("*") if "incomplete" in path.name or path.name.startswith(".config")]
    return found + [str(path) for path in cache.rglob("*") if path.is_symlink() and not path.exists()]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubName("Qwen/Qwen3-0.6B", "v1.0")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("tiny", None),
        ("./a/b", None),
        ("/a/b", None),
        ("~/a", None),
        ("a/b/c", None),
        ("a/../b", None),
        ("a/b@../c", None),
        ("a--x/b", None),
        ("data/train.jsonl", None),
        ("models/x.gguf", None),
        ("a/b@", None),
        ("a/b c", None),
    ],
)
def test_names_are_told_apart_from_paths(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name
    if name is not None:
        assert str(name) == text


def test_the_cache_is_where_the_client_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", "$WHERE/home")
    monkeypatch.setenv("WHERE", str(tmp_path))
    assert hub_cache() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert hub_cache() == tmp_path / "cache"


def test_a_model_is_fetched_by_name_with_what_is_needed_only_and_pinned(hub: StubHub, tiny_files: Any) -> None:
    others = {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"x", "original/params.json": b"{}", "README.md": b"x"}
    hub.model("org/big", {**tiny_files, **others})
    name = fetch_model("org/big")
    assert name == f"org/big@{commit_of(hub, 'org/big')}"
    folder = model_folder(name)
    assert sorted(path.name for path in folder.iterdir()) == NEEDED == sorted(hub.downloads())
    assert {file: (folder / file).read_bytes() for file in NEEDED} == {file: tiny_files[file] for file in NEEDED}
    asked = len(hub.seen)
    assert fetch_model(name) == name
    assert len(hub.seen) == asked, "a pinned model that is here needs no hub"


def test_progress_is_told_on_stderr_and_can_be_switched_off(
    hub: StubHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_model("org/tiny")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fetching org/tiny@{commit_of(hub)[:8]} from {hub.url}: 5 files, 4.2 MB\n")
    assert "model.safetensors (5 of 5; 4.2 MB of 4.2 MB)" in err
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    shutil.rmtree(hub_cache())
    fetch_model("org/tiny")
    assert capsys.readouterr() == ("", "")


def test_weights_in_several_files_come_with_their_index(hub: StubHub, tiny_files: dict[str, bytes]) -> None:
    weights, parts = (
        tiny_files.pop("model.safetensors"),
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    )
    index = {"weight_map": {"a": parts[0], "b": parts[1]}}
    split = {parts[0]: weights, parts[1]: weights[::-1], "consolidated.safetensors": weights}
    hub.model("org/split", {**tiny_files, **split, "model.safetensors.index.json": json.dumps(index).encode()})
    folder = model_folder(fetch_model("org/split"))
    assert {path.name for path in folder.glob("model*")} == {*parts, "model.safetensors.index.json"}
    assert not (folder / "consolidated.safetensors").exists()


@pytest.mark.parametrize("file", ["chat_template.json", "chat_template.jinja"])
def test_a_chat_template_in_a_file_of_its_own_comes_too(hub: StubHub, tiny_files: dict[str, bytes], file: str) -> None:
    hub.model("org/chat", {**tiny_files, file: b"{}"})
    assert (model_folder(fetch_model("org/chat")) / file).is_file()


def test_a_folder_of_that_name_is_the_folder(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_files: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(Config().model_folder, "org/tiny")
    assert name_on_hub("org/tiny") is None
    assert fetch_model("org/tiny") == "org/tiny"
    assert not hub.seen


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: StubHub, tiny_files: dict[str, bytes]) -> None:
    first = commit_of(hub)
    repo = hub.models["org/tiny"]
    second = repo.commit({**tiny_files, "generation_config.json": b'{"eos_token_id": 0}'})
    repo.refs["v1"] = first
    assert fetch_model("org/tiny") == f"org/tiny@{second}"
    assert fetch_model("org/tiny@v1") == fetch_model(f"org/tiny@{first}") == f"org/tiny@{first}"
    kept = model_folder(f"org/tiny@{first}") / "generation_config.json"
    assert kept.read_bytes() == tiny_files["generation_config.json"]


def test_a_named_model_answers_from_python_and_from_the_command_line(hub: StubHub) -> None:
    (answers,) = LLM("org/tiny", device="cpu").generate(["12+34="], Sampling(max_new_tokens=8, temperature=0.0))
    named = llamarl("generate", "org/tiny", "--prompt", "12+34=", "--max-new-tokens", 8, "--device", "cpu")
    shipped = llamarl("generate", "tiny", "--prompt", "12+34=", "--max-new-tokens", 8, "--device", "cpu")
    assert (named.code, named.out) == (0, shipped.out) == (0, f"{answers[0].text}\n")


def test_the_planner_needs_the_config_alone(hub: StubHub) -> None:
    assert Path(fetch_model_config("org/tiny")).read_bytes() == (Config().model_folder / "config.json").read_bytes()
    assert hub.downloads() == ["config.json"]
    done = llamarl("simulate", "model.path=org/tiny", "schedule.updates=2")
    assert done.code == 0, done.err


def test_offline_the_cache_is_used_and_nothing_is_asked(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fetch_model("org/tiny")
    asked = len(hub.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_model("org/tiny") == name
    with pytest.raises(
        InputError, match=r"HF_HUB_OFFLINE is set, so org/other cannot be fetched, and it is not in the cache"
    ):
        fetch_model("org/other")
    assert len(hub.seen) == asked


def test_files_that_other_programs_fetched_count_if_they_are_whole(
    hub: StubHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fetch_model("org/tiny")
    shutil.rmtree(cache / "models--org--tiny" / "llamarl")  # as if huggingface_hub alone had been here
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_model("org/tiny") == name
    (model_folder(name) / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"holds only a part of it, without model\.safetensors"):
        fetch_model("org/tiny")


def test_without_a_network_the_cache_is_used_and_that_is_said(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = fetch_model("org/tiny")
    capsys.readouterr()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch_model("org/tiny") == name
    assert "cannot be reached" in (told := capsys.readouterr().err)
    assert f"commit {commit_of(hub)[:8]} is taken from the cache" in told


def bad_hub(hub: StubHub, files: dict[str, bytes]) -> None:
    """Models that cannot be used, each for a reason of its own."""
    hub.model("org/gated", files, gated=True)
    hub.model("org/secret", files, private=True)
    bare = {name: data for name, data in files.items() if name != "model.safetensors"}
    hub.model("org/pickle", {**bare, "pytorch_model.bin": b"x"})
    hub.model("org/gguf", {"model-q4.gguf": b"GGUF"})
    hub.model("org/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    hub.model("org/lost", {**bare, "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}'})
    hub.model("org/thief", {**bare, "model.safetensors.index.json": b'{"weight_map": {"a": "../../../x.safetensors"}}'})
    hub.model("org/climber", {**files, "../../../../evil.json": b"x"})
    hub.model("org/broken", {**files, "config.json": b"{"})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("org/tinny", "no file or folder org/tinny here, and the hub has no model org/tinny"),
        ("org/secret", "if it is private, set HF_TOKEN"),
        ("org/gated", "org/gated is gated: accept its terms at http://127.0.0.1"),
        ("org/tiny@v9", "org/tiny has no branch, tag or commit 'v9'"),
        ("org/tiny@" + "0" * 40, "org/tiny has no branch, tag or commit '00000"),
        ("org/pickle", "its weights are pickles, which can run code and are not read"),
        ("org/gguf", "make a folder of it with `llamarl import-gguf`"),
        ("org/adapter", "it is a LoRA adapter: name its base model"),
        ("org/lost", "names model-1.safetensors, which is not there"),
        ("org/thief", "names ../../../x.safetensors, which is not there"),
        ("org/climber", "answers, but not like the Hugging Face Hub"),
        ("org/broken", "config.json"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_exit_code_2(
    hub: StubHub, cache: Path, tmp_path: Path, tiny_files: dict[str, bytes], name: str, reason: str
) -> None:
    bad_hub(hub, tiny_files)
    done = llamarl("train", f"model.path={name}", "--quiet", "--run", tmp_path / "run")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1 and done.err.startswith("llamarl: model.path: ") and reason in done.err
    assert not (tmp_path / "run").exists() and not left_in(cache)
    assert not list(tmp_path.rglob("evil*")) and not list(tmp_path.parent.glob("evil*"))


@pytest.mark.parametrize("fault", ["no network", "busy", "offline"])
def test_a_hub_that_does_not_answer_is_one_line(
    hub: StubHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "no network":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    elif fault == "busy":
        hub.status = 503
    else:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = llamarl("train", "model.path=org/tiny", "--quiet", "--run", tmp_path / "run")
    reason = {"no network": "cannot be reached", "busy": "answers with error 503", "offline": "HF_HUB_OFFLINE is set"}
    assert done.code == 2 and done.err.count("\n") == 1 and reason[fault] in done.err
    assert "not in the cache" in done.err and not (tmp_path / "run").exists() and not cache.exists()


def test_a_download_that_breaks_off_leaves_nothing_half_and_is_made_good_later(hub: StubHub, cache: Path) -> None:
    hub.cut_short = "model.safetensors"
    done = llamarl("generate", "org/tiny", "--prompt", "1+1=")
    assert done.code == 2 and "the download of org/tiny@" in done.err and "broke off; try it again" in done.err
    assert "Traceback" not in done.err and not left_in(cache)
    name = f"org/tiny@{commit_of(hub)}"
    assert not (model_folder(name) / "model.safetensors").exists()
    hub.cut_short = ""
    before = len(hub.downloads())
    assert fetch_model("org/tiny") == name
    assert hub.downloads()[before:] == ["model.safetensors"], "whole files are not fetched again"


def test_a_model_that_was_half_fetched_is_not_taken_for_whole_offline(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cut_short = "model.safetensors"
    with pytest.raises(InputError):
        fetch_model("org/tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=r"model\.safetensors of it is not in the cache"):
        fetch_model("org/tiny")


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    with pytest.raises(InputError, match=r"org/tiny@\w+ takes 4\.2 MB, and the disk of .* has 0 bytes free"):
        fetch_model("org/tiny")
    assert not hub.downloads()


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing_half(hub: StubHub, cache: Path) -> None:
    with watching(Disk(fails_at=0, full=True, only="incomplete")), pytest.raises(InputError) as refused:
        fetch_model("org/tiny")
    assert "no room for org/tiny" in str(refused.value)
    assert not left_in(cache)
    fetch_model("org/tiny")


def test_a_token_is_sent_to_the_hub_alone_and_never_shown(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_files: Any
) -> None:
    hub.token = SECRET
    hub.model("org/gated", tiny_files, gated=True)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    fetch_model("org/gated")
    assert hub.tokens == {SECRET} and not hub.leaked
    monkeypatch.setenv("HF_TOKEN", "hf_wrongtoken")
    done = llamarl("generate", "org/gated@main", "--prompt", "x")
    assert done.code == 2 and "check HF_TOKEN" in done.err and done.err.count("\n") == 1
    assert "hf_wrong" not in done.err
    assert SECRET not in "".join(capsys.readouterr())


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = llamarl("generate", "org/tiny", "--prompt", "x")
    assert done.code == 2
    assert done.err == (
        "llamarl: MODEL: no file or folder org/tiny here; to fetch it by that name from the Hugging Face Hub: "
        "pip install 'llamarl[hub]'\n"
    )
