"""A logger of your own: rewards and held-out accuracy as a CSV file in the run folder.

    python examples/own_logger.py RUN_FOLDER [KEY=VALUE ...]
    python examples/own_logger.py RUN_FOLDER --resume

It runs in a thread of its own: whatever it does, the job goes on. A resumed run continues the file, each update once.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl import Job, MetricLogger


class CsvLogger(MetricLogger):
    """Writes the rows (kind, step, value)."""

    def start(self, run: Any) -> Mapping[Any, int]:
        self._file = (run.folder / "rewards.csv").open("a", newline="", buffering=1)
        self._rows = csv.writer(self._file)
        return {}  # what the run folder says was not sent yet comes next

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._rows.writerow(["reward", update, values.get("reward")])

    def log_evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self._rows.writerow(["held_out_accuracy", version, values["held_out_accuracy"]])

    def finish(self, outcome: str) -> None:
        self._file.close()


def main(folder: str, *settings: str) -> None:
    if settings == ("--resume",):
        Job.resume(folder, loggers=[CsvLogger()])
    else:
        Job.load(overrides=settings, loggers=[CsvLogger()]).run(folder)
    print((Path(folder) / "rewards.csv").read_text(), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
