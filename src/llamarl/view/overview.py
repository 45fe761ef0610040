"""The first page of a run: is it learning, is it healthy, what limits it, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from llamarl.observe.summary import MEMORY
from llamarl.view.page_advice import Advised, page_advice, recent_means
from llamarl.view.run_reader import RunReader, fitted
from llamarl.view.series import Floats, bin_updates, binned, smoothed

Z95 = 1.96
MAX_POINTS = 2000
_MAX_MARKS = 400
_SMOOTH_SHARE = 20  # a smoothed curve averages over this part of the updates


class PageAnswer(Struct, frozen=True):
    """The answer to one question about a run, with the facts it rests on."""

    question: str
    verdict: str
    tone: str  # good, fair, bad or unknown
    facts: list[str]


def overview(run: RunReader) -> dict[str, Any]:
    state, words = run.state
    summary, config = run.summary, run.config
    advice = page_advice(run)
    return {
        "name": run.name,
        "folder": str(run.path),
        "state": state,
        "outcome": words,
        "updates": run.num_updates,
        "updates_of": config.schedule.updates,
        "elapsed_s": _elapsed_s(run),
        "began_at": str(run.starts[0].get("at", "")) if run.starts else "",
        "answers": [_learning(run), _healthy(run, advice), _limits(run)],
        "advice": advice,
        "facts": _facts(run),
        "metrics": sorted({*run.metrics.names, *derived_names(run)}),
        "evaluations": evaluations(run),
        "score_name": config.score_name,
        "marks": _thinned(msgspec.to_builtins(run.marks)),
        "notes": _notes(run),
        "summary": msgspec.to_builtins(summary) if summary else None,
    }


def _elapsed_s(run: RunReader) -> float:
    known = run.elapsed_s[~np.isnan(run.elapsed_s)]
    return float(known.max()) if len(known) else 0.0


def _thinned(marks: list[Any]) -> list[Any]:
    """At most so many marks, rare kinds first: a long run has thousands of evaluations and snapshots."""
    by_kind: dict[str, list[Any]] = {}
    for mark in marks:
        by_kind.setdefault(mark["kind"], []).append(mark)
    return [mark for kind in by_kind.values() for mark in kind[:: 1 + len(kind) // _MAX_MARKS]]


def _facts(run: RunReader) -> list[tuple[str, str]]:
    config = run.config
    s = config.schedule
    return [
        ("model", config.model.path),
        ("task", config.task.kind + (f" {config.task.path}" if config.task.path else "")),
        ("loss", config.algo.loss),
        ("batch", f"{s.groups_per_update} groups x {s.samples_per_group} answers"),
        ("max staleness", str(s.max_staleness)),
        ("learning rate", f"{config.trainer.lr:g}"),
        ("new tokens", f"at most {config.generator.max_new_tokens}"),
        ("engine", config.engine.kind),
        *([("memory", memory)] if (memory := _memory(run)) else []),
    ]


def _memory(run: RunReader) -> str:
    """The most that one rank of each role has held so far, and a whole GPU."""
    told = {name.removesuffix(MEMORY): run.timings.get(name) for name in _memory_names(run)}
    known = {role: values[~np.isnan(values)] for role, values in told.items()}
    return ", ".join(
        f"{'whole GPU' if role == 'gpu' else role} {values.max():.1f} GiB"
        for role, values in known.items()
        if len(values)
    )


def _memory_names(run: RunReader) -> list[str]:
    return [name for name in run.timings.names if name.endswith(MEMORY)]


def _notes(run: RunReader) -> list[str]:
    found = [run.config_error] if run.config_error else []
    if not run.num_updates:
        found.append("No update is recorded yet.")
    if run.spans_full:
        found.append("The timeline reached observe.spans_mb; later work is not in it.")
    return found


def evaluations(run: RunReader) -> list[dict[str, Any]]:
    """Evaluations, with a 95% interval where the score is right or wrong."""
    found = []
    for row in run.evaluations:
        value, count = float(row.get("accuracy", 0.0)), row.get("problems", run.config.evaluate.prompts)
        low, high = wilson(value, count) if run.config.score_name == "accuracy" and count else (value, value)
        found.append({"version": row["version"], "value": value, "low": low, "high": high})
    return found


def wilson(share: float, count: int) -> tuple[float, float]:
    """95% interval of a share among `count` trials, by Wilson's formula."""
    squared = Z95 * Z95
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    half = Z95 * sqrt(share * (1 - share) / count + squared / (4 * count * count)) / (1 + squared / count)
    return max(0.0, middle - half), min(1.0, middle + half)


# Answers


def _learning(run: RunReader) -> PageAnswer:
    question, reward = "Is it learning?", run.metrics.get("reward")
    known = reward[~np.isnan(reward)]
    facts = []
    scored = evaluations(run)
    if len(scored) > 1:
        first, last = scored[0], scored[-1]
        facts.append(f"held-out {run.config.score_name} {first['value']:.3f} -> {last['value']:.3f}")
    if len(known) < 4:
        return PageAnswer(question, "too early to say", "unknown", [*facts, f"{len(known)} updates so far"])
    part = max(2, len(known) // 10)
    first_part, last_part = known[:part], known[-part:]
    gain = float(last_part.mean() - first_part.mean())
    error = Z95 * sqrt(float(first_part.var(ddof=1)) / part + float(last_part.var(ddof=1)) / part)
    facts.append(
        f"mean reward {first_part.mean():.3f} -> {last_part.mean():.3f} (first and last {part} updates, ±{error:.3f})"
    )
    if gain > error:
        return PageAnswer(question, "yes", "good", facts)
    if gain < -error:
        return PageAnswer(question, "it gets worse", "bad", facts)
    return PageAnswer(question, "no change yet", "fair", facts)


def _distance(means: Mapping[str, float]) -> str:
    """How far samples are from the policy, as far as an update has told it."""
    if "effective_sample_size" not in means:
        return "nothing trained, so nothing to compare samples with"
    clipped = f", clipped {means['clipped_share']:.1%}" if "clipped_share" in means else ""
    return f"effective samples {means['effective_sample_size']:.0%}{clipped}"


def _healthy(run: RunReader, advice: list[Advised]) -> PageAnswer:
    question, means = "Is it healthy?", recent_means(run)
    if not means:
        return PageAnswer(question, "too early to say", "unknown", [])
    deaths = sum(mark.kind == "death" for mark in run.marks)
    facts = [
        f"staleness {means.get('staleness_mean', 0.0):.2f}, at most {run.config.schedule.max_staleness} allowed in order",
        _distance(means),
        f"cut off {means.get('truncated_share', 0.0):.0%}, no variance {means.get('zero_variance_share', 0.0):.0%}",
    ]
    if deaths:
        facts.append(
            f"{deaths} deaths of executors, all recovered" if run.state[0] != "stopped" else f"{deaths} deaths"
        )
    bad = [one for one in advice if one.tone == "bad"]
    fair = [one for one in advice if one.tone == "fair"]
    if bad:
        return PageAnswer(question, "no", "bad", [bad[0].short, *facts])
    if fair:
        return PageAnswer(question, "mostly", "fair", [fair[0].short, *facts])
    return PageAnswer(question, "yes", "good", facts)


def _limits(run: RunReader) -> PageAnswer:
    question, idle = "What limits it?", waiting_shares(run)
    if not idle:
        return PageAnswer(question, "not recorded", "unknown", ["who waits is not recorded in this run"])
    busiest = min(idle, key=lambda role: idle[role])
    facts = [f"{role} waits {share:.0%}" for role, share in sorted(idle.items(), key=lambda item: item[1])]
    speed = run.timings.get("update_s")
    if len(known := speed[~np.isnan(speed)]):
        facts.append(f"{float(np.median(known[-50:])):.2f} s an update (median of the last {min(50, len(known))})")
    return PageAnswer(question, f"the {busiest}", "good" if idle[busiest] < 0.2 else "fair", facts)


def waiting_shares(run: RunReader) -> dict[str, float]:
    """Share of the time that each role waited: of the whole last start if it has ended, else of its recent spans."""
    summary = run.summary
    if summary is not None and summary.idle_share:
        return dict(summary.idle_share)
    store = run.spans().get(run.last_start)
    if store is None:
        return {}
    return {role: float(share[0]) for role, share in store.waiting(np.array([0.0, store.end_s])).items()}


# Series


def derived_names(run: RunReader) -> list[str]:
    """Names of the series that are made from timings and spans."""
    names = ["generated_per_s", "trained_per_s", "update_s"] if run.timings.num_updates else []
    return [*names, *_memory_names(run), *(f"waiting.{role}" for role in run.span_roles)]


def column(run: RunReader, name: str) -> Floats:
    """One number per update: a metric, or one of the derived series."""
    if name.startswith("waiting."):
        return _waiting_column(run, name.removeprefix("waiting."))
    if name in ("generated_per_s", "trained_per_s"):
        update_s = fitted(run.timings.get("update_s"), run.num_updates)
        tokens = run.metrics.get("answer_tokens") * run.metrics.get("completions")
        if name == "trained_per_s":
            tokens = run.metrics.get("trained_tokens")
        return tokens / np.maximum(update_s, 1e-9)
    if name == "elapsed_s":
        return run.elapsed_s
    if name == "tokens_total":
        return np.nancumsum(run.metrics.get("answer_tokens") * run.metrics.get("completions"))
    if name in run.metrics.names:
        return run.metrics.get(name)
    return fitted(run.timings.get(name), run.num_updates)


def _waiting_column(run: RunReader, role: str) -> Floats:
    found = np.full(run.num_updates, np.nan)
    at_s, starts = fitted(run.timings.get("at_s"), run.num_updates), fitted(run.timings.get("start"), run.num_updates)
    for number, store in run.spans().items():
        here = np.flatnonzero((starts == number) & ~np.isnan(at_s))
        if len(here) > 1 and role in (shares := store.waiting(at_s[here])):
            found[here[1:]] = shares[role]
    return found


def series(run: RunReader, names: list[str], first: int, last: int, points: int) -> dict[str, Any]:
    """Binned series of the updates [first, last), each with a smoothed curve beside it."""
    last = min(last, run.num_updates) if last > 0 else run.num_updates
    first = max(0, min(first, last))
    points = max(2, min(points, MAX_POINTS))
    width = max(1, (last - first) // _SMOOTH_SHARE)
    found = {}
    for name in names:
        values = column(run, name)
        found[name] = binned(values, first, last, points)
        found[name]["smooth"] = binned(smoothed(values, width), first, last, points)["mean"]
    return {
        "updates": bin_updates(first, last, points),
        "width": width,
        "num_updates": run.num_updates,
        "first": first,
        "last": last,
        "series": found,
    }
