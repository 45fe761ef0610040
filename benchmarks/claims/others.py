"""Claim 21: other systems beside ours, on the same GPU and the same job: model folder, prompts, answers of the same length,
rewards by the same judge. TRL's GRPOTrainer with `generate`, and with its continuous batching.

    python -m venv trl && trl/bin/pip install trl && trl/bin/pip install -e .    # beside an environment of this project
    python benchmarks/claims/others.py --trl trl/bin/python [--at-most N] [--updates 6] [KEY=VALUE ...]
    python benchmarks/claims/others.py --trl trl/bin/python --small [KEY=VALUE ...]    # sums with SmolLM2, on a CPU

Ours is examples/gsm8k_qwen.yaml for 20 updates, as it stands and with the groups that teach nothing computed too, as TRL
computes them. TRL makes 6 updates (--updates), of which the first is not counted. What cannot be had is told in a line: TRL
with vLLM runs if vLLM is installed beside TRL; AReno needs nvcc and flash-attn, and is not run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from arms import GSM8K, SMOLLM2, Arm, Figures, Options, Record, as_figures, claim_parser, keep, made_all, options_of
from plot import bars
from windows import steady

from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.tasks.registry import open_task, own_scorers

UPDATES, THEIRS, ROWS = 20, 6, 16  # updates of ours and of TRL; rows of one of TRL's passes
BRIEF = (f"schedule.updates={UPDATES}", "evaluate.prompts=0", "evaluate.every=0", "snapshots.at_end=none")
OURS: dict[str, tuple[str, ...]] = {
    "LlamaRL": ("ours",),
    "LlamaRL, all groups computed": ("ours-all", "algo.zero_variance=keep"),
}
TRL: dict[str, dict[str, Any]] = {
    "TRL": {},
    "TRL, continuous batching": {"use_transformers_continuous_batching": True},
    "TRL, vLLM": {"use_vllm": True, "vllm_mode": "colocate"},
}
NOT_RUN = {"AReno": "compiles kernels with nvcc and needs flash-attn, which are not installed by this script"}


def arms(options: Options) -> dict[str, Arm]:
    folder, config = folder_of(options), SMOLLM2 if options.small else GSM8K
    return {name: Arm(f"{folder}/{run}", (*BRIEF, *settings), config) for name, (run, *settings) in OURS.items()}


def folder_of(options: Options) -> str:
    return "others_small" if options.small else "others"


def job_of(config: Config, options: Options, folder: Path) -> dict[str, Any]:
    """The same job for TRL: the prompts of our first updates, in their order."""
    schedule = config.schedule
    task, updates = open_task(config), options.updates or THEIRS
    problems = [task.problem(number) for number in range(updates * schedule.groups_per_update)]
    batch = schedule.groups_per_update * schedule.samples_per_group
    return {
        "model": str(config.model_folder.absolute()),
        "data": [{"prompt": prompt_of(config, one), "answer": one.answer} for one in problems],
        "own_scorers": own_scorers(config.task),
        "reward": msgspec.to_builtins(config.reward),
        "lr": config.trainer.lr,
        "updates": updates,
        "groups": schedule.groups_per_update,
        "samples": schedule.samples_per_group,
        "rows": next(rows for rows in range(min(ROWS, batch), 0, -1) if batch % rows == 0),
        "max_new_tokens": config.generator.max_new_tokens,
        "folder": str(folder),
    }


def prompt_of(config: Config, problem: Any) -> Any:
    """Messages, which TRL lays out by the model's own template as we do; text if the job has no chats."""
    turns = [{"role": turn.role, "content": turn.content} for turn in problem.turns]
    return turns if config.task.chat else problem.prompt


def theirs(name: str, python: str, job: dict[str, Any], options: Options) -> dict[str, Any] | str:
    """What a job of TRL took, or in a line why there is none. One that was made is not made again."""
    stem = name.lower().replace(", ", "-").replace(" ", "-")
    folder = options.runs / folder_of(options)
    described, result = folder / f"{stem}.job.json", folder / f"{stem}.json"
    text = json.dumps({**job, "how": how(name, options)})
    if result.exists() and described.exists() and described.read_text() != text:
        sys.exit(f"{result}: was made with other settings; remove it, or name another folder with --runs")
    if not result.exists():
        if name.endswith("vLLM") and (reason := missing(python, "vllm")):
            return reason
        options.begin(f"{folder.name}/{stem}")
        folder.mkdir(parents=True, exist_ok=True)
        described.write_text(text)
        print(f"== {folder.name}/{stem}: {job['updates']} updates", flush=True)
        begun_s = time.monotonic()
        command = [python, str(Path(__file__).with_name("trl_job.py")), str(described), str(result)]
        with (
            (folder / f"{stem}.log").open("w") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        ):
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                log.write(line)
                last = line.strip() or last
                if line.startswith("update "):
                    print(f"{name}: {line.rstrip()}", flush=True)
        if process.returncode:
            return f"failed: {last[:200]} (all of it: {folder / f'{stem}.log'})"
        options.ended(f"{folder.name}/{stem}", time.monotonic() - begun_s)
    found: dict[str, Any] = json.loads(result.read_text())
    return {
        **found,
        "update_s": statistics.median(found["updates_s"][1:]),
        "answer_tokens": statistics.fmean(found["answer_tokens"][1:]),
    }


def how(name: str, options: Options) -> dict[str, Any]:
    """Arguments of GRPOConfig; small models' caches need no half of the machine's memory."""
    share = 0.02 if options.tiny else 0.1
    cache = {"transformers_continuous_batching_config": {"max_memory_percent": share, "max_batch_tokens": 256}}
    return {**TRL[name], **(cache if (options.tiny or options.small) and "continuous" in name else {})}


def missing(python: str, module: str) -> str:
    """Why a module cannot be had in that Python; empty if it can."""
    ended = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    return "" if ended.returncode == 0 else (ended.stderr.strip().splitlines() or ["it does not start"])[-1]


def ours(record: Record) -> dict[str, Any]:
    window = steady(record)
    rewards = [row["reward"] for _, row in sorted(record.metrics.items()) if "reward" in row]
    tokens = record.answer_tokens(window)
    return {"update_s": window.update_s, "answer_tokens": tokens, "reward": rewards, "window": as_figures(window)}


def main() -> None:
    parser = claim_parser(__doc__, small="sums after three solved ones, with SmolLM2")
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON", help="Python that has trl (this one)")
    args = parser.parse_intermixed_args()
    options = options_of(args)
    if reason := missing(args.trl, "trl, datasets, msgspec"):
        reason = f"--trl {args.trl}: {reason}; pip install trl, and llamarl beside it"
        if args.trl != sys.executable:  # asked for
            sys.exit(reason)
    mine = arms(options)
    config = load_config(mine["LlamaRL"].config, [*BRIEF, *options.settings])
    job = job_of(config, options, options.runs / folder_of(options) / "trl")
    found: dict[str, Any] = {name: ours(record) for name, record in made_all(mine, options).items()}
    found |= {name: reason or theirs(name, args.trl, job, options) for name in TRL}
    had = {name: one for name, one in found.items() if isinstance(one, dict)}
    not_had = NOT_RUN | {name: one for name, one in found.items() if isinstance(one, str)}
    print(f"{'':30} s an update  answer tokens  tokens/s  reward, first updates")
    for name, one in had.items():
        rate, reward = one["answer_tokens"] / one["update_s"], statistics.fmean(one["reward"][: job["updates"]])
        print(f"{name:30} {one['update_s']:11.2f}  {one['answer_tokens']:13,.0f}  {rate:8,.0f}  {reward:.3f}")
    for name, reason in not_had.items():
        print(f"{name:30} not run: {reason}")
    update_s = had["LlamaRL"]["update_s"]
    times = {name: one["update_s"] / update_s for name, one in had.items() if name.startswith("TRL")}
    for name, ratio in times.items():
        print(f"an update is {ratio:.1f} times as fast as with {name}")
    keep("others", options, {"systems": had, "not_run": not_had, "times_as_fast": times}, picture)


def picture(figures: Figures) -> str:
    values = {name: one["update_s"] for name, one in figures["systems"].items()}
    return bars("One update of the same job on the same machine", "seconds", values, " s")


if __name__ == "__main__":
    main()
