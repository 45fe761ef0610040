"""How much of its steady rate a generator keeps in a real job: real prompts, answers that end when they end, refill, judging,
messages, ledger, new versions all the time.

    python benchmarks/generator_in_a_job.py [--updates 40] [--staleness 1,4] [--json result.json] [KEY=VALUE ...]

The job is `examples/gsm8k_qwen.yaml`, with a trainer that takes its batch and publishes the next version without computing
anything: the generator has the GPU to itself, as where the trainer has another. Tokens of the answers trained on are
counted from the tenth update on, when what occurs often has been captured: until there are no more prompts to begin and the
line drains, and to the very end. The steady rate is that of the same shape with random weights, all slots busy, with prompts
and answers of the job's mean lengths. Exits with 1 if no staleness reaches 75% to the very end.
With --watch it also tells where the generator's time went (`watched.py`); events on the GPU cost a little of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch
from pretending import PretendedTrainer, update_times  # beside this script
from watched import KERNELS, WATCH_FILE, shares, watched_generator  # too

from llamarl import Job
from llamarl.bench.decode import DecodeBench
from llamarl.bench.decode_case import DecodeCase
from llamarl.builders.context import BuildContext
from llamarl.builders.trainer import build_trainer
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.executors.executor import Executor
from llamarl.generate.prompting import prompt_tokens
from llamarl.model.hf_config import read_shape
from llamarl.model.tokenizer import Tokenizer
from llamarl.tasks.registry import make_task

PROMISED = 0.75
WARM_UP = 10
EXAMPLE = Path(__file__).parents[1] / "examples" / "gsm8k_qwen.yaml"
PROBLEMS = 256  # whose prompts are counted
SHORTEST = 16  # tokens, as in `llamarl bench decode`: a rate is counted from the second burst on


def instant_trainer(site: BuildContext) -> Executor:
    return PretendedTrainer(build_trainer(site), lambda: None)


@dataclass(frozen=True)
class Rate:
    tokens_s: float
    answer: float  # tokens of one, on average
    whole: float  # tokens a second until the very end
    update_s: list[float]  # of every update


def rate_in_job(config: Config, *, watch: bool) -> Rate:
    with tempfile.TemporaryDirectory() as temporary:
        folder, file = Path(temporary) / "run", Path(temporary) / "watched"
        os.environ[WATCH_FILE] = str(file)
        Job(config, builders={"trainer": instant_trainer, **({"generator": watched_generator} if watch else {})}).run(
            folder
        )
        at_s = update_times(folder)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        end = len(at_s) - 1 - (config.schedule.max_staleness + 1)
        if watch:
            begun_s = json.loads((folder / "summary.json").read_text())["started_at"]
            tell(shares(file, begun_s + at_s[WARM_UP - 1], begun_s + at_s[end]))
            if (kernels := file.with_name(file.name + KERNELS)).exists():
                print(f"during a few bursts:\n{kernels.read_text()}", file=sys.stderr)
    trained = {row["update"]: row for row in rows if row["role"] == "trainer"}
    tokens = [trained[update]["answer_tokens"] * trained[update]["completions"] for update in range(len(at_s))]
    counted, since_s = slice(WARM_UP, end + 1), at_s[WARM_UP - 1]
    return Rate(
        tokens_s=sum(tokens[counted]) / (at_s[end] - since_s),
        answer=sum(tokens[counted]) / sum(trained[update]["completions"] for update in range(WARM_UP, end + 1)),
        whole=sum(tokens[WARM_UP:]) / (at_s[-1] - since_s),
        update_s=[round(later - earlier, 3) for earlier, later in pairwise(at_s)],
    )


def tell(found: dict[str, float]) -> None:
    print(
        f"a burst takes {found['burst_s'] * 1e3:.1f} ms (median {found['median_s'] * 1e3:.1f}), with {found['rows']:.0f} "
        "sequences in slots",
        file=sys.stderr,
    )
    for name, value in sorted(found.items()):
        if name.startswith(("host", "gpu")):
            print(f"{name:30} {value:6.1%} of the time", file=sys.stderr)
        elif name.startswith("times"):
            print(f"{name.removeprefix('times '):30} {value:6.2f} a burst", file=sys.stderr)


def steady_rate(config: Config, answer_tokens: float, device: str) -> float:
    tokenizer, task = Tokenizer.load(config.model_folder), make_task(config.task, config.seed)
    prompts = [prompt_tokens(tokenizer, problem) for problem in task.evaluation(PROBLEMS, "held_out")]
    case = DecodeCase(
        model=str(config.model_folder),
        batch=config.generator.slots,
        prompt=round(mean(map(len, prompts))),
        new=max(SHORTEST, round(answer_tokens)),
        samples=config.schedule.samples_per_group,
        precision="bf16" if device == "cuda" else "fp32",
        device=device,
    )
    return DecodeBench(read_shape(config.model_folder), case, longest=case.new).steady()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--staleness", default="1,4", help="one run for each of these")
    parser.add_argument("--watch", action="store_true", help="tell where the generator's time went")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="such as model.path=... and task.path=...")
    args = parser.parse_intermixed_args()
    depths = [int(number) for number in args.staleness.split(",")]
    if args.updates < (least := WARM_UP + max(depths) + 2):
        parser.error(f"--updates: {args.updates} leave nothing between start and end; at least {least}")
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    print(
        "| staleness | tokens/s in the job | tokens of an answer | steady tokens/s | share | share with the end |\n"
        "|---:|---:|---:|---:|---:|---:|"
    )
    for staleness in depths:
        schedule = [f"schedule.updates={args.updates}", f"schedule.max_staleness={staleness}"]
        ours = [*schedule, "evaluate.prompts=0", "evaluate.every=0", "snapshots.at_end=policy"]
        config = load_config(EXAMPLE, [*ours, *args.settings])
        rate = rate_in_job(config, watch=args.watch)
        steady = steady_rate(config, rate.answer, device)
        rows.append({"staleness": staleness, **asdict(rate), "steady": steady, "share": rate.tokens_s / steady})
        print(
            f"| {staleness} | {rate.tokens_s:,.0f} | {rate.answer:.0f} | {steady:,.0f} | {rate.tokens_s / steady:.1%} "
            f"| {rate.whole / steady:.1%} |",
            flush=True,
        )
        if device == "cuda":
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.exit(max(row["whole"] / row["steady"] for row in rows) < PROMISED)


if __name__ == "__main__":
    main()
