"""Is an update as long as it was predicted to be? Runs held against their rehearsal by `llamarl simulate`.

    python benchmarks/predictions.py [--rounds 3] [--updates 12] [--core-seconds] [--json result.json]
    python benchmarks/predictions.py --gpu machine.json [--gpus 1] [--model SHAPE] RUN [RUN ...]

Without RUNs, small jobs of very different shapes on this CPU. Each round calibrates (`llamarl bench --calibrate --threads 1`,
which counts the seconds of a core), runs the jobs, all of which do real work (generate, score, train, publish), and compares.
The median over the rounds counts. The machine must be quiet. Where it is not, --core-seconds measures the synchronous
jobs by the seconds of all cores that an update takes (a run of N updates against one of N/4): their executors take turns, so
that is how long an update takes when nobody else wants the cores. Exits with 1 when one is off by more than 15%.

With RUNs, runs that were made elsewhere, on a machine that `llamarl bench --calibrate` described; needs no torch.

Of a run only what is no time is read: its settings, how many tokens prompts and answers had, how many answers were cut off
and how many groups had equal rewards. From these and the machine's description the simulation predicts the time of an
update, which is compared with the run's own (mean from a tenth of the run on).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rehearsed import compare, print_table

from llamarl.config import Config
from llamarl.model.hf_config import read_shape
from llamarl.model_spec import ModelSpec

PROMISED = 0.15
COMMON = [
    "generator.threads=1",
    "trainer.threads=1",
    "evaluate.prompts=0",
    "snapshots.every=0",
    "schedule.probe_every=0",
    "algo.zero_variance=keep",
]
SYNC = ["schedule.max_staleness=0", "placement=colocated"]
LONG = [
    "schedule.groups_per_update=16",
    "schedule.samples_per_group=4",
    "generator.slots=128",
    "generator.max_new_tokens=96",
]
WIDE = [
    "schedule.groups_per_update=8",
    "schedule.samples_per_group=4",
    "generator.slots=64",
    "generator.max_new_tokens=16",
]
MANY = [
    "schedule.groups_per_update=64",
    "schedule.samples_per_group=2",
    "generator.slots=256",
    "generator.max_new_tokens=24",
]
JOBS: dict[str, list[str]] = {
    "default job, synchronous": SYNC,
    "few long answers, synchronous": ["model.path=LONG", *LONG, *SYNC],
    "many pairs of answers, synchronous": ["model.path=LONG", *MANY, *SYNC],
    "wide model, few short answers, synchronous": ["model.path=WIDE", *WIDE, *SYNC],
    "default job, S = 1": [],
    "few long answers, S = 1": ["model.path=LONG", *LONG],
}


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """Untrained, with the shipped model's vocabulary: answers end by chance, after 17 tokens on average."""
    from llamarl.model.checkpoint import random_model, save_model

    tiny = Config().model_folder
    before = read_shape(tiny)
    shape = ModelSpec(
        vocab_size=before.vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 13 // 4,
        num_layers=layers,
        num_heads=hidden // 32,
        num_kv_heads=hidden // 64,
        head_dim=32,
        max_positions=256,
        tied_head=True,
    )
    save_model(random_model(shape), folder, carry_from=tiny)


def llamarl(*args: str) -> None:
    done = subprocess.run([sys.executable, "-m", "llamarl.cli", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"llamarl {' '.join(args)}: {done.stderr}")


def one_round(folder: Path, models: Path, updates: int, in_core_seconds: bool) -> dict[str, tuple[float, float]]:
    """By job: seconds measured and predicted."""
    machine = folder / "machine.json"
    llamarl("bench", "--calibrate", "--device", "cpu", "--threads", "1", "--json", str(machine))
    found = {}
    for number, (name, settings) in enumerate(JOBS.items()):
        if in_core_seconds and not set(SYNC) <= set(settings):
            continue
        placed = [
            one.replace("=LONG", f"={models / 'long'}").replace("=WIDE", f"={models / 'wide'}") for one in settings
        ]
        short_s = run_job(folder / f"short{number}", updates // 4, placed) if in_core_seconds else 0.0
        core_s = run_job(folder / f"run{number}", updates, placed)
        row = compare(folder / f"run{number}", str(machine), 0, "")
        measured_s = (core_s - short_s) / (updates - updates // 4) if in_core_seconds else row["measured"]["update_s"]
        found[name] = (measured_s, row["predicted"]["update_s"])
        print(f"{name}: measured {measured_s:.3f} s, predicted {found[name][1]:.3f} s", file=sys.stderr, flush=True)
    return found


def run_job(run: Path, updates: int, settings: list[str]) -> float:
    """Seconds of all cores that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    llamarl("train", f"schedule.updates={updates}", *COMMON, *settings, "--quiet", "--run", str(run))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_rounds(rounds: list[dict[str, tuple[float, float]]]) -> float:
    print("| job | update measured, s | predicted, s | error, median | each round |\n|---|---:|---:|---:|---|")
    worst = 0.0
    for name in rounds[0]:
        errors = [one[name][1] / one[name][0] - 1 for one in rounds]
        worst = max(worst, abs(median(errors)))
        shown = ", ".join(f"{value:+.0%}" for value in errors)
        times = [median(one[name][side] for one in rounds) for side in (0, 1)]
        print(f"| {name} | {times[0]:.3f} | {times[1]:.3f} | {median(errors):+.1%} | {shown} |")
    return worst


def run_jobs(num_rounds: int, updates: int, in_core_seconds: bool) -> list[dict[str, tuple[float, float]]]:
    with tempfile.TemporaryDirectory() as temporary:
        models = Path(temporary) / "models"
        models.mkdir()
        make_model(models / "long", 128, 5)
        make_model(models / "wide", 384, 8)
        folders = [Path(temporary) / f"round{number}" for number in range(num_rounds)]
        for folder in folders:
            folder.mkdir()
        return [one_round(folder, models, updates, in_core_seconds) for folder in folders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--gpu", default="", help="the machine's description, by `llamarl bench --calibrate`")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs there were; 0: one for each rank")
    parser.add_argument("--model", default="", help="a shape by name, where the model folder is not here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--core-seconds", action="store_true", help="synchronous jobs, by the time of their cores")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    worst, found = 0.0, []
    if args.runs:
        found = [compare(run, args.gpu, args.gpus, args.model) for run in args.runs]
        print_table(found)
    else:
        found = run_jobs(args.rounds, args.updates, args.core_seconds)
        worst = print_rounds(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(worst > PROMISED)


if __name__ == "__main__":
    main()
