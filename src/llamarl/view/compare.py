"""Several runs side by side: their curves over updates, tokens and minutes, settings that differ, the same problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from llamarl.types import RolloutGroup
from llamarl.view.overview import column, evaluations
from llamarl.view.rollouts import RolloutBook
from llamarl.view.run_reader import RunReader, flat
from llamarl.view.series import binned, smoothed

_POINTS = 400
_SHARED = 40  # problems that are listed
_LOOKED_AT = 20_000  # problems of each run that are compared
_NO_DIFFERENCE = ("observe.",)
AXES = ("update", "tokens", "minutes")


def curves(runs: Sequence[RunReader], name: str) -> dict[str, Any]:
    """A metric of every run, with the three axes for each point."""
    found = []
    for run in runs:
        count = run.num_updates
        values = column(run, name)
        axes = {
            "update": np.arange(count, dtype=float),
            "tokens": column(run, "tokens_total"),
            "minutes": run.elapsed_s / 60,
        }
        found.append(
            {
                "name": run.name,
                "axes": {axis: binned(points, 0, count, _POINTS)["mean"] for axis, points in axes.items()},
                "values": binned(values, 0, count, _POINTS)["mean"],
                "smooth": binned(smoothed(values, max(1, count // 20)), 0, count, _POINTS)["mean"],
                "evaluations": evaluations(run),
            }
        )
    return {"metric": name, "runs": found}


def settings_that_differ(runs: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Names of settings with more than one value, and the value in each run."""
    settled = [flat(msgspec.to_builtins(run.config)) for run in runs]
    names = sorted({name for settings in settled for name in settings})
    rows = [{"setting": name, "values": [settings.get(name) for settings in settled]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def totals(run: RunReader) -> dict[str, Any]:
    """A run in one row of a table."""
    scored = evaluations(run)
    reward = run.metrics.get("reward")
    known = reward[~np.isnan(reward)]
    part = max(1, len(known) // 10)
    elapsed = run.elapsed_s[~np.isnan(run.elapsed_s)]
    return {
        "name": run.name,
        "state": run.state[0],
        "updates": run.num_updates,
        "minutes": float(elapsed.max()) / 60 if len(elapsed) else 0.0,
        "tokens": float(np.nansum(run.metrics.get("answer_tokens") * run.metrics.get("completions"))),
        "reward_first": float(known[:part].mean()) if len(known) else None,
        "reward_last": float(known[-part:].mean()) if len(known) else None,
        "eval_first": scored[0]["value"] if scored else None,
        "eval_last": scored[-1]["value"] if scored else None,
        "score_name": run.config.score_name,
    }


def shared_problems(books: Sequence[RolloutBook]) -> list[dict[str, Any]]:
    """Problems that every run was asked, with the newest answers of each."""
    if len(books) < 2:
        return []
    asked = [list(dict.fromkeys(book.kept.newest_problems(_LOOKED_AT))) for book in books]
    common = set(asked[0]).intersection(*asked[1:])
    found = []
    for problem in [one for one in asked[0] if one in common][:_SHARED]:
        answers = []
        for book in books:
            saved = book.kept.group(book.kept.groups_of_problem(problem)[0])
            if saved is not None and isinstance(saved.group, RolloutGroup):
                group, rewards = saved.group, saved.group.rewards
                answers.append(
                    {
                        "ordinal": group.ordinal,
                        "update": saved.update,
                        "reward": sum(rewards) / len(rewards),
                    }
                )
                prompt = group.prompt.problem.prompt[-160:]
        if len(answers) == len(books):
            found.append({"problem": str(problem), "prompt": prompt, "answers": answers})
    return found
