"""The scripts behind docs/results.md run from end to end, share their runs, and read them rightly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.brief import BRIEF, ROOT, TINY

SETTINGS = [
    *BRIEF,
    *TINY,
    f"task.path={ROOT / 'tests' / 'data' / 'gsm8k'}",
    "reward.scorer=length",
    "schedule.updates=9",
    "schedule.groups_per_update=1",
    "evaluate.prompts=4",
    "evaluate.every=8",
]


def claim(name: str, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    where = ["--runs", str(folder / "runs"), "--results", str(folder / "results")]
    command = [sys.executable, str(ROOT / "benchmarks" / "claims" / f"{name}.py"), *where, *SETTINGS, *settings]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_claims_run_read_and_share_their_arms(tmp_path: Path) -> None:
    names = ["learns", "against_trl", "weight_sync", "async_against_sync"]
    ended = {name: claim(name, tmp_path) for name in names}
    assert {name: run.returncode for name, run in ended.items()} == dict.fromkeys(names, 0), ended
    assert [name for name, run in ended.items() if "== async:" in run.stdout] == ["learns"]
    figures = {name: json.loads((tmp_path / "results" / f"{name}.json").read_text()) for name in names}
    for name in names:
        assert ElementTree.parse(tmp_path / "results" / f"{name}.svg").getroot().tag.endswith("svg")
        assert figures[name]["command"].startswith(f"python {ROOT / 'benchmarks' / 'claims' / name}.py engine=inline")
    assert [len(figures["learns"]["accuracy"]), figures["learns"]["met"]] == [3, False]  # versions 0, 8 and 9
    assert figures["against_trl"]["window"]["last"] == 7, "updates with an evaluation among them were taken for steady"
    assert figures["async_against_sync"]["sync"]["trainer_waits"] > 0.1
    assert figures["async_against_sync"]["async"]["gpu_idle"] is None
    assert 0 < figures["weight_sync"]["share"] < 1
    other = claim("learns", tmp_path, "seed=1")
    assert (other.returncode, "was made with other settings" in other.stderr) == (1, True)


def test_a_run_that_was_broken_off_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "runs" / "async").mkdir(parents=True)
    (tmp_path / "runs" / "async.settings.json").write_text(json.dumps(SETTINGS))
    ended = claim("learns", tmp_path)
    assert ended.returncode == 1
    assert "broken off" in ended.stderr


def test_a_series_of_runs_can_be_spread_over_commands(tmp_path: Path) -> None:
    ended = claim("long_tails", tmp_path, "--at-most", "0")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "long_sync: is the next to be made; the same command goes on with it\n"


@pytest.mark.parametrize("values", [[(0.0, 1.0)], [(0.0, 0.0), (0.0, 0.0)], [(-3.0, 1e6), (7.0, -1e-6)]])
def test_plots_take_any_numbers(values: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    import plot

    ElementTree.fromstring(plot.lines("a < b", "x", "y", {"one & two": values}))
    ElementTree.fromstring(plot.bars("a < b", "y", {f"<{number}>": value for number, (_, value) in enumerate(values)}))
