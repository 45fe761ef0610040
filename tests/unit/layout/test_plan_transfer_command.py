"""`llamarl plan-transfer` answers at once, without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.cli import llamarl

KEYS = {"predicted_s", "floor_s", "total_bytes", "minimum_bytes", "max_sent_bytes", "max_received_bytes"}


def test_the_figures_come_as_json() -> None:
    done = llamarl(
        "plan-transfer",
        "--model",
        "llama-3.1-70b",
        "--trainer",
        "fsdp=8,tp=4",
        "--generator",
        "tp=8,replicas=4",
        "--json",
    )
    found = json.loads(done.out)
    assert found.keys() == KEYS
    assert found["total_bytes"] == found["minimum_bytes"]
    assert found["floor_s"] <= found["predicted_s"] < 1.1 * found["floor_s"]


def test_it_reads_well_too() -> None:
    done = llamarl(
        "plan-transfer", "--model", "llama-3.2-1b", "--trainer", "fsdp=2", "--generator", "tp=2", "--nic", "25"
    )
    assert "2 trainer ranks to 2 generator ranks" in done.out
    assert "predicted" in done.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "llama-9"], "no model shape is named 'llama-9'"),
        (["--trainer", "fsdp=zwei"], "--trainer: cannot read 'fsdp=zwei'"),
        (["--generator", "precision=int1"], "--generator: cannot read 'precision=int1'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], complaint: str) -> None:
    done = llamarl("plan-transfer", *arguments)
    assert done.code == 2
    assert complaint in done.err
    assert len(done.err.splitlines()) == 1


def test_it_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom llamarl.cli import app\n"
        "try: app(['plan-transfer', '--model', 'llama-3.2-1b'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
