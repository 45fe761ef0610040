"""Sync against async over the length of answers: what a user decides by. MATH with answers of up to 512, 1,024, 2,048 and
4,096 tokens, S = 8 (as in claim 6) and S = 1 against co-located sync on one GPU.

    python benchmarks/claims/over_length.py --ahead [--gpu machine.json]          # before anything is paid for
    python benchmarks/claims/over_length.py [--gpu machine.json] [--runs FOLDER]  # with the runs of claim 6 (long_tails.py)

The lines are the simulator's, from the machine's description and the lengths of answers, cut off at each limit: those of the
run of claim 6, or, with --ahead, an assumption. Points are measured: those of claim 6. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import long_tails
from arms import MATH, Arm, Figures, Options, Record, keep
from plot import lines
from predicted import MACHINE

sys.path.insert(0, str(Path(__file__).parents[1]))

from rehearsed import seen

from llamarl.config.file import load_config
from llamarl.model_spec import shape_named
from llamarl.plan.gpus import gpu_named
from llamarl.plan.lengths import Lengths
from llamarl.simulate.setup import SimulationSetup, make_simulation
from llamarl.simulate.simulation import SimulationResult

LIMITS = (512, 1024, 2048, 4096)
UPDATES = 60  # enough for the steady state
QWEN_SHAPE = "qwen2.5-1.5b"
PAPER = Arm(
    "S = 1", (*long_tails.ASYNC.settings, "schedule.max_staleness=1", "schedule.window=1", "generator.slots=512")
)
ARMS = {"sync": long_tails.SYNC, "async, S = 1": PAPER, f"async, S = {long_tails.STALENESS}": long_tails.ASYNC}
# Assumed of a small model on MATH: most answers have some hundred tokens, some never end.
MEDIAN, SIGMA, ENDLESS, PROMPT, SKIPPED = 380, 0.5, 0.03, 120, 0.4


def assumed() -> list[int]:
    body = Lengths(f"lognormal:median={MEDIAN},sigma={SIGMA},max={LIMITS[-1]}")
    ended = round(1000 * (1 - ENDLESS))
    return [round(body.quantile((at + 0.5) / ended)) for at in range(ended)] + [LIMITS[-1]] * (1000 - ended)


def lengths_seen(run: Path) -> tuple[int, list[int], float]:
    """Tokens of a prompt, of every answer, and the share of groups with equal rewards."""
    prompt, answers, skipped = seen(run, LIMITS[-1])
    file = answers.spec.removeprefix("file:")
    if file == answers.spec:
        sys.exit(f"{run}: keeps no groups, so the lengths of its answers are not known")
    return prompt, [int(line) for line in Path(file).read_text().split()], skipped


def rehearsed(arm: Arm, limit: int, lengths: Sequence[int], prompt: int, skipped: float, args: Any) -> SimulationResult:
    file = args.runs / f"lengths-{limit}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(str(min(limit, length)) for length in lengths))
    settings = [*arm.settings, f"generator.max_new_tokens={limit}", f"schedule.updates={UPDATES}"]
    scene = SimulationSetup(
        config=load_config(MATH, settings),
        shape=shape_named(QWEN_SHAPE),
        gpu=gpu_named(args.gpu),
        gpus=1,
        answers=Lengths(f"file:{file}"),
        prompt=prompt,
        skipped=skipped,
    )
    return make_simulation(scene).run()


def predictions(
    lengths: Sequence[int], prompt: int, skipped: float, args: Any
) -> dict[str, dict[int, dict[str, float]]]:
    table: dict[str, dict[int, dict[str, float]]] = {name: {} for name in ARMS}
    for limit in LIMITS:
        for name, arm in ARMS.items():
            found = rehearsed(arm, limit, lengths, prompt, skipped, args)
            table[name][limit] = {"update_s": found.update_s, "trainer_waits": found.idle_share["trainer"]}
        sync_s = table["sync"][limit]["update_s"]
        told = ", ".join(
            f"{name} {row[limit]['update_s']:.2f} s ({sync_s / row[limit]['update_s']:.2f}x, trainer waits "
            f"{row[limit]['trainer_waits']:.0%})"
            for name, row in table.items()
        )
        print(f"up to {limit:5} tokens: {told}")
    return table


def points(runs: Path) -> dict[str, float]:
    """Of claim 6, in the steady state."""
    rows = long_tails.rows_of(lambda arm: Record(runs / arm.name))
    return {name: float(row["update_s"]) for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ahead", action="store_true", help="from an assumption about the lengths of answers")
    parser.add_argument("--gpu", default=str(MACHINE), help="the machine's description, by `llamarl bench --calibrate`")
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    sync = args.runs / long_tails.SYNC.name
    prompt, lengths, skipped = (PROMPT, assumed(), SKIPPED) if args.ahead else lengths_seen(sync)
    table = predictions(lengths, prompt, skipped, args)
    measured = {} if args.ahead else points(args.runs)
    assumption = {"median": MEDIAN, "sigma": SIGMA, "endless": ENDLESS, "prompt": PROMPT, "skipped": SKIPPED}
    figures = {"predicted": table, "measured": measured, "assumed": assumption if args.ahead else None}
    keep(
        "over_length_ahead" if args.ahead else "over_length",
        Options(args.runs, args.results, (), 0, Path(), command=("--ahead",) if args.ahead else ()),
        figures,
        picture,
    )
    print(json.dumps(measured) if measured else "nothing measured yet")


def picture(figures: Figures) -> str:
    series = {
        f"{name}, predicted": [(float(limit), row["update_s"]) for limit, row in rows.items()]
        for name, rows in figures["predicted"].items()
    }
    measured = {f"{name}, measured": [(float(LIMITS[-1]), at_s)] for name, at_s in figures["measured"].items()}
    title = "Sync against async on one H200, MATH"
    return lines(title, "tokens an answer may have", "seconds an update", series | measured, tuple(measured))


if __name__ == "__main__":
    main()
