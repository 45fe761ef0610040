"""What dynamic sampling and a curriculum gain on arithmetic: updates, groups and tokens until a given accuracy.

    python benchmarks/difficulty.py [--seeds 3] [--jobs 2] [--out benchmarks/results/difficulty.md]

The tiny model on a CPU, in deterministic mode, so the same command gives the same figures. Each way runs with every seed for
the same number of updates and is evaluated on the same held-out sums, greedily. An accuracy counts as reached at the first of
two evaluations in a row that are at least as high. The result file is written by this command, whatever it says.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit

EVERY = 2
COMMON = (
    "engine=inline",
    "schedule.deterministic=true",
    "schedule.max_staleness=1",
    "schedule.samples_per_group=8",
    "generator.slots=512",
    "trainer.lr=6e-5",
    "trainer.warmup_updates=2",
    "trainer.threads=1",
    "generator.threads=1",
    f"evaluate.every={EVERY}",
    "snapshots.every=0",
    "snapshots.at_end=none",
    "observe.rollouts_mb=0",
)
BUDGET = 96


class Way(NamedTuple):
    """Settings of one way to train, and how many times the experiment's groups an update has."""

    settings: tuple[str, ...] = ()
    groups: float = 1.0


# As many groups as dynamic sampling generates in the first experiment, which is 2.34 times as many as plain training.
AS_MANY = 2.34
WAYS = {
    "plain": Way(),
    "plain, larger batches": Way(groups=AS_MANY),
    "dynamic sampling": Way((f"schedule.dynamic_sampling={BUDGET}",)),
    "curriculum": Way(("task.curriculum=true",)),
}


class Experiment(NamedTuple):
    """A task, and the accuracy that is to be reached."""

    name: str
    settings: tuple[str, ...]
    groups: int
    updates: int
    target: float
    ways: tuple[str, ...]


EXPERIMENTS = (
    Experiment(
        "sums up to 99 + 99, each asked at most once",
        ("task.max_operand=99", "evaluate.prompts=256"),
        groups=32,
        updates=12,
        target=0.5,
        ways=("plain", "plain, larger batches", "dynamic sampling"),
    ),
    Experiment(
        "a small set that is asked again and again: sums up to 14 + 14",
        ("task.max_operand=14", "task.held_out=0.4", "evaluate.prompts=128"),
        groups=16,
        updates=24,
        target=0.2,
        ways=("plain", "curriculum"),
    ),
)


class Found(NamedTuple):
    """What one run came to."""

    accuracies: dict[int, float]  # by version
    groups: list[int]  # groups generated up to each update
    tokens: int
    clean: bool


def run(experiment: Experiment, way: str, seed: int, folder: Path) -> Found:
    asked = WAYS[way]
    batch = round(experiment.groups * asked.groups)
    command = [sys.executable, "-m", "llamarl", "train", *COMMON, *experiment.settings, *asked.settings]
    command += [f"schedule.updates={experiment.updates}", f"schedule.groups_per_update={batch}"]
    command += [f"seed={seed}", "--run", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=3600)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    groups: list[int] = []
    for row in rows:
        groups.append((groups[-1] if groups else 0) + batch + int(row.get("groups_replaced", 0)))
    summary = json.loads((folder / "summary.json").read_text())
    clean = audit(read_ledger(folder / "ledger")).clean
    return Found({one["version"]: one["accuracy"] for one in evaluations}, groups, summary["tokens_generated"], clean)


def reached(found: Found, target: float) -> int | None:
    """The version at which the accuracy was reached, and held at the next evaluation; None: never."""
    versions = sorted(found.accuracies)
    for version, after in zip(versions, [*versions[1:], versions[-1]], strict=True):
        if min(found.accuracies[version], found.accuracies[after]) >= target:
            return version
    return None


def describe(experiment: Experiment, results: dict[str, list[Found]]) -> list[str]:
    lines = [
        f"## {experiment.name[0].upper()}{experiment.name[1:]}",
        "",
        f"{experiment.updates} updates of {experiment.groups} groups of 8 answers. Accuracy to reach: {experiment.target:g}.",
        *_explained(results),
        "",
        "| way | updates until reached, by seed | groups generated until then | last accuracy, by seed (mean) | "
        "groups generated in all (mean) | audits |",
        "|---|---|---|---|---|---|",
    ]
    for way, runs in results.items():
        versions = [reached(one, experiment.target) for one in runs]
        until = [one.groups[version - 1] if version else version for one, version in zip(runs, versions, strict=True)]
        last = [one.accuracies[max(one.accuracies)] for one in runs]
        lines.append(
            f"| {way} | {_listed(versions)} | {_listed(until)} | {', '.join(f'{one:.3f}' for one in last)} "
            f"({mean(last):.3f}) | {mean(one.groups[-1] for one in runs):.0f} | "
            f"{'clean' if all(one.clean for one in runs) else 'NOT clean'} |"
        )
    lines += ["", "Mean held-out accuracy over the seeds:", ""]
    shown = range(0, experiment.updates + 1, 2 * EVERY)
    lines += [f"| update | {' | '.join(map(str, shown))} |", "|---|" + "---|" * len(shown)]
    for way, runs in results.items():
        lines.append(f"| {way} | {' | '.join(f'{mean(one.accuracies[v] for one in runs):.3f}' for v in shown)} |")
    return [*lines, ""]


def _explained(results: dict[str, list[Found]]) -> list[str]:
    if "plain, larger batches" not in results:
        return []
    return [f"Larger batches have {AS_MANY:g} times as many groups: as many as dynamic sampling generates."]


def _listed(values: Sequence[int | None]) -> str:
    return ", ".join("not reached" if value is None else str(value) for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "difficulty.md")
    asked = parser.parse_args()
    lines = [
        "# Dynamic sampling and a curriculum on arithmetic",
        "",
        f"`python benchmarks/difficulty.py --seeds {asked.seeds}`: the tiny model on a CPU ({platform.machine()}), "
        "deterministic mode, S = 1.",
        f"Budget of dynamic sampling: {BUDGET} groups an update. An accuracy counts as reached at the first of two "
        "evaluations",
        f"in a row (every {EVERY} updates) that are at least as high.",
        "",
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        cases = [(e, way, seed) for e in EXPERIMENTS for way in e.ways for seed in range(asked.seeds)]
        futures = {case: pool.submit(run, *case, Path(folder) / f"run-{number}") for number, case in enumerate(cases)}
        for experiment in EXPERIMENTS:
            results = {
                way: [futures[experiment, way, seed].result() for seed in range(asked.seeds)] for way in experiment.ways
            }
            lines += describe(experiment, results)
            asked.out.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
