"""A machine with nothing but pip: the wheel, a model and a dataset by name and an own reward train without a checkout.

`make test-wheel` runs it. It builds the wheel and installs it with PyTorch into a new environment, which takes minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from helpers.brief import ROOT
from helpers.stub_hub import StubHub, stub_hub

from llamarl.config import Config

pytestmark = [
    pytest.mark.skipif(not os.environ.get("LLAMARL_TEST_WHEEL"), reason="takes minutes: make test-wheel"),
    pytest.mark.timeout(1800),
]

REWARD = '''
def score(completion, answer, level):
    """Half a point for the right number of digits; the column `level` comes from the data."""
    assert level in ("easy", "hard")
    return 1.0 if completion.strip() == answer else 0.5 * (len(completion.strip()) == len(answer))
'''
JOB = """
model: {path: org/tiny}
task: {kind: dataset, path: org/sums, config: plain, prompt_field: question, answer_field: solution.value}
reward: {scorer: my_reward.py:score, workers: 1}
generator: {slots: 32}
schedule: {updates: 2, groups_per_update: 4, samples_per_group: 4}
evaluate: {prompts: 8, split: test}
"""
README = b"""---
configs:
- config_name: plain
  data_files:
  - {split: train, path: plain/train-*}
  - {split: test, path: plain/test-*}
- config_name: other
  data_files: other/*
---
"""


def parquet(rows: list[dict[str, object]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel and its extras, built from a copy of the sources."""
    base = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", base / "tree" / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, base / "tree" / name)
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", base, base / "tree"], check=True)
    (wheel,) = base.glob("llamarl-*.whl")
    subprocess.run([sys.executable, "-m", "venv", base / "venv"], check=True)
    binaries = base / "venv" / "bin"
    own_pip = [str(binaries / "pip"), "-qq", "--disable-pip-version-check"]
    subprocess.run([*own_pip, "install", f"{wheel}[hub,data]"], check=True)
    shutil.rmtree(base / "tree")
    return binaries


@pytest.fixture
def hub() -> Iterator[StubHub]:
    rows: list[dict[str, object]] = [
        {"question": f"{a}+{b}=", "solution": {"value": str(a + b)}, "level": "easy" if a < 5 else "hard"}
        for a in range(10)
        for b in range(10)
    ]
    with stub_hub() as hub:
        hub.token = "hf_anns"
        hub.model("org/tiny", Config().model_folder, license="mit")
        files = {
            "plain/train-00000-of-00001.parquet": parquet(rows[20:]),
            "plain/test-00000-of-00001.parquet": parquet(rows[:20]),
        }
        hub.dataset("org/sums", {"README.md": README, **files, "other/x.csv": b"not read"})
        yield hub


def run(command: list[object], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_names_and_an_own_reward_train_without_a_checkout(installed: Path, hub: StubHub, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "job.yaml").write_text(JOB)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_", "VIRTUAL"))}
    path = f"{installed}:/usr/bin:/bin"
    environment = {**kept, "PATH": path, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": hub.token}
    environment["HF_HUB_DISABLE_XET"] = "1"  # a transport of its own, for the real hub
    llamarl = installed / "llamarl"

    where = run([installed / "python", "-c", "import llamarl; print(llamarl.__file__)"], tmp_path, environment)
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)

    trained = run([llamarl, "train", "job.yaml", "--run", "run"], tmp_path, environment)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["updates"], summary["groups_dropped"]) == ("finished", 2, 0)
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings["model"]["path"] == f"org/tiny@{hub.models['org/tiny'].refs['main']}"
    assert settings["task"]["path"] == f"org/sums@{hub.datasets['org/sums'].refs['main']}"
    assert run([llamarl, "audit", "run"], tmp_path, environment).returncode == 0

    offline = {**environment, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    more = [llamarl, "train", "--run", "run", "--resume", "schedule.updates=3"]
    resumed = run(more, tmp_path, offline)
    assert resumed.returncode == 0, resumed.stderr

    pushed = run([llamarl, "push", "run", "ann/sums"], tmp_path, environment)
    assert pushed.returncode == 0, pushed.stderr
    repo = hub.models["ann/sums"]
    card = repo.commits[repo.refs["main"]]["README.md"].decode()
    assert repo.private and "base_model: org/tiny" in card and "license: mit" in card and "- org/sums" in card
