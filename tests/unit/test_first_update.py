"""The phases of a start are read from the run folder alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "first_update.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("first_update", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "first_update", module)
    spec.loader.exec_module(module)
    return module


def test_phases_count_from_the_command_to_the_end_of_the_first_update(script: Any, tmp_path: Path) -> None:
    timings = [{"start": 1, "unix_s": 1003.0}, {"update": 0, "at_s": 9.0}, {"update": 1, "at_s": 11.0}]
    spans = {
        "trainer/0": [["work", "start", 1, 4], ["work", "compile", 4, 7], ["work", "WorkOnBatch", 8, 9]],
        "generator/0": [["work", "start", 1, 3], ["work", "slice", 5, 6], ["work", "slice", 7, 8]],
    }
    later = {"trainer/0": [["work", "WorkOnBatch", 10, 11]]}
    (tmp_path / "timings.jsonl").write_text("\n".join(map(json.dumps, timings)))
    rows = [{"start": 1, "spans": spans}, {"start": 1, "spans": later}]
    (tmp_path / "spans.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = script.start_of(tmp_path, began_s=1000.0)
    assert found.first_update_s == 12.0
    assert {phase.name: (phase.start_s, phase.end_s) for phase in found.phases} == {
        "imports and checks, until the job begins": (0.0, 3.0),
        "generator/0: loads its model": (4.0, 6.0),
        "trainer/0: loads its model": (4.0, 7.0),
        "trainer/0: compiles its passes": (7.0, 10.0),
        "generator/0: works (samples, saves)": (8.0, 11.0),
        "trainer/0: the update": (11.0, 12.0),
    }


def test_stacks_tell_where_each_process_was_longest(script: Any, tmp_path: Path) -> None:
    ours = f"main.py:<module>;{script.PACKAGE}train/learner.py:update;/lib/site-packages/torch/a.py:one"
    rows = [
        (100.0, "main.py:<module>"),
        (100.4, f"{ours};/lib/site-packages/torch/b.py:two;/lib/site-packages/torch/c.py:three"),
        (100.8, f"{ours};/lib/site-packages/torch/b.py:two;/lib/site-packages/torch/d.py:four"),
        (101.2, "main.py:<module>;<frozen importlib>:load"),
        (150.0, "main.py:<module>;late.py:function"),
    ]
    (tmp_path / "7").write_text("".join(f"{at}\t{frames}\n" for at, frames in rows))
    (tmp_path / "8").write_text("100.0\tshort.py:one\n")
    assert list(script.longest(tmp_path, 99.0, 20.0)) == [
        "process 7, 1.2 s",
        "    0.80 s  llamarl/train/learner.py:update > torch/a.py:one > torch/b.py:two",
        "    0.40 s  main.py:<module>",
    ]
