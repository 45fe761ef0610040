"""A model folder asked a fixed set of problems: which of them it gets right. What was asked once is not asked again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from arms import Options
from watch import gpu_name


def right(name: str, model: str, config: Path, settings: list[str], options: Options) -> list[bool]:
    """Problem by problem, greedily; the answers are kept beside the runs, in `NAME.jsonl`."""
    file = options.runs / f"{name}.jsonl"
    if not file.exists():
        options.begin(name)
        _ask(file, model, config, settings)
    rows = {row["problem"]: row["reward"] == 1.0 for row in map(json.loads, file.read_text().splitlines())}
    return [rows[number] for number in sorted(rows)]


def _ask(file: Path, model: str, config: Path, settings: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    device = "cpu" if gpu_name() == "none" else "cuda"
    asked = ["eval", model, str(config), *settings, "--split", "test", "--device", device, "--answers", str(partial)]
    print(f"== llamarl {' '.join(asked)}", flush=True)
    if subprocess.run([sys.executable, "-m", "llamarl.cli", *asked], check=False).returncode:
        sys.exit(f"{file}: the model could not be asked")
    partial.rename(file)
