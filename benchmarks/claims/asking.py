"""A model folder asked a fixed set of problems: which of them it gets right. What was asked once is not asked again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from arms import GSM8K, MATH, Options, llamarl
from watch import gpu_name

QWEN = "models/qwen2.5-coder-1.5b"
# A third of the pages that all slots could fill: answers are rarely as long as they may be, and others share the GPU.
ROOM = ("generator.slots=512", "generator.kv_pages=20000")


def right(name: str, model: str, config: Path, settings: list[str], options: Options) -> list[bool]:
    """Problem by problem, greedily; the answers are kept beside the runs, in `NAME.jsonl`."""
    file = options.runs / f"{name}.jsonl"
    if not file.exists():
        options.begin(name)
        _ask(name, file, model, config, settings, options)
    rows = {row["problem"]: row["reward"] == 1.0 for row in map(json.loads, file.read_text().splitlines())}
    return [rows[number] for number in sorted(rows)]


def right_in_gsm8k(name: str, model: str, options: Options, *settings: str) -> list[bool]:
    return right(f"{name}.GSM8K", model, GSM8K, [*ROOM, *options.settings, *settings], options)


def right_in_math(name: str, model: str, options: Options) -> list[bool]:
    """MATH-500; settings of the command line are for GSM8K, so its folder is left out."""
    others = [one for one in options.settings if not one.startswith("task.path=")]
    settings = [*ROOM, "generator.max_new_tokens=1024", *others, f"task.path={options.math}"]
    return right(f"{name}.MATH-500", model, MATH, settings, options)


def _ask(name: str, file: Path, model: str, config: Path, settings: list[str], options: Options) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    device = "cpu" if gpu_name() == "none" else "cuda"
    where = ["--split", "test", "--device", device, "--answers", str(partial)]
    if llamarl(name, ["eval", model, str(config), *settings, *where], options):
        sys.exit(f"{name}: the model could not be asked")
    partial.rename(file)
