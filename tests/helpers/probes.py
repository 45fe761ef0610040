"""What the probes of a run found."""

from __future__ import annotations

import json
from pathlib import Path


def logprob_gaps(run: Path) -> list[float]:
    """The gaps between generator and trainer, in the order of the updates. A damaged row fails the test."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["logprob_gap"] for row in rows if "logprob_gap" in row]
