"""`generate` and `eval`: the device is chosen and said, and a wrong model is told in one line before anything starts."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers.cli import llamarl
from rich.console import Console

from llamarl.cli.devices import describe_device, device_or_refuse
from llamarl.config import Config
from llamarl.errors import InputError
from llamarl.jobs.job import Job
from llamarl.observe.display import Progress, Quiet, panel_of

TINY = Config().model_folder
SHORT = ["engine=inline", "schedule.updates=1", "schedule.groups_per_update=2", "generator.slots=16"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def add_key(model: Path, key: str, value: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


def test_the_shipped_model_can_be_asked_by_its_name() -> None:
    code, out, err = llamarl("generate", "tiny", "--prompt", "12+34=", "--max-new-tokens", "4")
    assert code == 0
    assert out.strip()
    assert err == "device: cpu, float32\n"


def test_eval_says_its_device_and_keeps_it_out_of_the_figures() -> None:
    code, out, err = llamarl("eval", "tiny", "arithmetic", "--problems", "4", "--json", "--device", "cpu")
    assert (code, err) == (0, "device: cpu, float32\n")
    assert json.loads(out)["problems"] == 4


def test_auto_is_a_gpu_where_there_is_one() -> None:
    with patch("torch.cuda.is_available", return_value=True):
        assert device_or_refuse("auto") == "cuda"
    with patch("torch.cuda.is_available", return_value=False):
        assert device_or_refuse("auto") == "cpu"
    with pytest.raises(InputError, match="--device abacus: expected auto, cpu, cuda or cuda:N"):
        device_or_refuse("abacus")


def test_a_gpu_that_this_torch_cannot_use_is_mentioned(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("")
    with patch("llamarl.cli.devices._NVIDIA_DRIVER", tmp_path / "version"), patch("torch.version.cuda", None):
        assert describe_device("cpu") == "cpu (there is a GPU, but this torch is a CPU build)"


@pytest.mark.parametrize("command", ["generate", "eval", "train"])
def test_damaged_weights_are_refused_before_anything_starts(command: str, model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    arguments = {
        "generate": ["generate", model, "--prompt", "1+1="],
        "eval": ["eval", model, "arithmetic"],
        "train": ["train", f"model.path={model}", "--run", tmp_path / "run"],
    }[command]
    code, out, err = llamarl(*arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("llamarl: ")
    assert "cut short" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "command", [["generate", "no/folder/x", "--prompt", "1"], ["eval", "no/folder/x", "arithmetic"]]
)
def test_a_missing_folder_is_the_first_thing_that_is_told(command: list[str]) -> None:
    code, out, err = llamarl(*command)
    assert (code, out) == (2, "")
    assert "no folder no/folder/x" in err
    assert err.count("\n") == 1


def test_a_key_that_is_ignored_is_said_once(model: Path, tmp_path: Path) -> None:
    add_key(model, "use_mrope", False)
    said: list[str] = []

    class Listening(Quiet):
        def note(self, text: str) -> None:
            said.append(text)

    Job.load(None, [*SHORT, f"model.path={model}", "evaluate.prompts=0"]).run(tmp_path / "run", display=Listening())
    assert [text for text in said if "use_mrope" in text] == [
        f'{model}/config.json: keys that are not known here, but are off, so nothing changes: "use_mrope"'
    ]
    _, _, err = llamarl("generate", model, "--prompt", "1+1=", "--max-new-tokens", "1")
    assert err.count("use_mrope") == 1


@pytest.mark.parametrize(("scorer", "name"), [("numeric", "accuracy"), ("length", "mean reward")])
def test_a_measure_has_its_right_name_everywhere(scorer: str, name: str, tmp_path: Path) -> None:
    other = {"accuracy": "mean reward", "mean reward": "accuracy"}[name]
    code, out, _ = llamarl("eval", "tiny", "arithmetic", f"reward.scorer={scorer}", "--problems", "4")
    assert code == 0
    assert out.startswith(name)
    settings = [*SHORT, f"reward.scorer={scorer}", "evaluate.prompts=4", "generator.device=cpu"]
    code, out, _ = llamarl("train", *settings, "--run", tmp_path / "run")
    assert code == 0
    assert f"held-out {name} of version 0: " in out
    assert any(line.startswith(f"held-out {name} ") and "->" in line for line in out.splitlines())
    assert other not in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["score_name"] == name


def test_the_live_view_names_what_is_measured() -> None:
    snapshot = Progress(
        update=1,
        updates=2,
        metrics={},
        tokens_generated=0,
        tokens_trained=0,
        elapsed_s=1.0,
        waiting={},
        accuracy=0.5,
        score_name="mean reward",
    )
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(panel_of(snapshot))
    assert "held-out mean reward" in console.export_text()
