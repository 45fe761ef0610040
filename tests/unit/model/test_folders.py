"""What is not a model folder is told with the way out, before anything is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llamarl.config import Config
from llamarl.errors import ModelError
from llamarl.model.checkpoint import check_headers, load_model

TINY = Config().model_folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        check_headers(folder)
    return str(refused.value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def test_a_hub_id_is_told_apart_from_a_folder_that_is_missing(tmp_path: Path) -> None:
    assert "on the Hugging Face Hub" in refusal(Path("Qwen/Qwen3-0.6B"))
    assert "Hub" not in refusal(tmp_path / "nowhere")
    assert "Hub" not in refusal(Path("./models/nowhere/x"))


def test_a_run_folder_points_to_the_policy_of_its_newest_snapshot(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "snapshots").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    assert "a run folder without a snapshot yet" in refusal(run)
    for version in (25, 100):
        shutil.copytree(model, run / "snapshots" / str(version) / "policy")
    (run / "snapshots" / "125" / "policy").mkdir(parents=True)  # being written
    assert refusal(run).endswith(f"is {run}/snapshots/100/policy")
    assert refusal(run / "snapshots" / "25").endswith(f"the model is in {run}/snapshots/25/policy")


def test_other_kinds_of_model_are_named(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert f"llamarl import-gguf {gguf} DIR" in refusal(gguf)
    assert f"llamarl import-gguf {gguf} DIR" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "LoRA adapter" in refusal(tmp_path)
    assert "give the folder that holds it" in refusal(tmp_path / "adapter_config.json")


def test_weights_that_are_pickles_are_refused_with_the_way_to_convert_them(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin, a pickle" in refusal(model)
    assert "save_pretrained" in refusal(model)


def test_weights_that_are_cut_short_are_found_by_the_header_alone(model: Path) -> None:
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    assert "cut short" in refusal(model)
    weights.write_bytes(data + b"more")
    assert "damaged" in refusal(model)


def test_a_git_lfs_pointer_is_recognized(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(model)


def test_the_check_reads_no_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    for name in ("read_span", "same_bytes"):
        monkeypatch.setattr(f"llamarl.model.checkpoint.{name}", read)
    check_headers(model)
    with pytest.raises(AssertionError, match="weights were read"):
        load_model(model)
