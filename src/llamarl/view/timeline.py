"""The timeline of one start of a job: a lane for each executor and rank, with what happened, and the prediction beside it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from llamarl.controller.default_line import default_line
from llamarl.errors import LlamaRLError
from llamarl.view.overview import waiting_shares
from llamarl.view.predicted import PredictedRun
from llamarl.view.run_reader import RunReader, fitted

_MAX_BINS = 1200
_MAX_UPDATES = 400


def timeline(run: RunReader, window: tuple[int, float, float, int]) -> dict[str, Any]:
    """`window`: number of the start (-1: the last), first and last second (0: the end), number of bins."""
    start, from_s, to_s, bins = window
    stores = run.spans()
    start = run.last_start if start < 0 else start
    store = stores.get(start)
    end_s = store.end_s if store else 0.0
    from_s, to_s = max(0.0, from_s), to_s if to_s > from_s else end_s
    bins = max(10, min(bins, _MAX_BINS))
    at_s = fitted(run.timings.get("at_s"), run.num_updates)
    here = np.flatnonzero(
        (fitted(run.timings.get("start"), run.num_updates) == start) & (at_s >= from_s) & (at_s <= to_s)
    )
    chosen = here[:: 1 + len(here) // _MAX_UPDATES]
    return {
        "starts": sorted(stores),
        "start": start,
        "from_s": from_s,
        "to_s": to_s,
        "end_s": end_s,
        "lanes": store.drawn(from_s, to_s, bins) if store else [],
        "bins": bins,
        "ranks": _ranks(run),
        "updates": [(int(update), round(float(at_s[update]), 3)) for update in chosen],
        "marks": [
            msgspec.to_builtins(mark)
            for mark in run.marks
            if mark.start == start and mark.at_s > 0 and from_s <= mark.at_s <= to_s
        ],
        "measured": _measured(run),
        "missing": ""
        if store
        else "No spans are recorded: the run was killed before spans.jsonl existed, or observe.spans_mb is 0.",
    }


def predicted_lanes(
    prediction: PredictedRun, prompt_tokens: float, from_s: float, to_s: float, bins: int
) -> dict[str, Any]:
    """The simulated lanes in a window of the same length, from the time when the line is full."""
    figures = prediction.figures(prompt_tokens)
    if "missing" in figures:
        return figures
    length = min(max(0.01, to_s - from_s), figures["wall_s"])
    begin = min(figures["wall_s"] * 0.25, figures["wall_s"] - length)
    lanes = prediction.drawn(begin, begin + length, max(10, min(bins, _MAX_BINS)))
    return {"from_s": begin, "to_s": begin + length, "lanes": lanes, **figures}


def _measured(run: RunReader) -> dict[str, Any]:
    update_s = run.timings.get("update_s")
    known = update_s[~np.isnan(update_s)]
    counted = known[max(1, len(known) // 10) :]
    return {"update_s": float(counted.mean()) if len(counted) else None, "waiting": waiting_shares(run)}


def _ranks(run: RunReader) -> dict[str, int]:
    """Number of ranks of each role; a prediction, and a run of an earlier release, has a lane for the first alone."""
    try:
        return {role.name: role.ranks for role in default_line(run.config).roles}
    except LlamaRLError:
        return {}
