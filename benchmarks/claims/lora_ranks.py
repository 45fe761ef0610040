"""Claim 15: LoRA of rank 1, 8 and 32 at ten times the learning rate against full training, GSM8K, two seeds each.

    python benchmarks/claims/lora_ranks.py [--beside 4] [--at-most N] [KEY=VALUE ...]

45 updates each, as the first third of claim 1, with packs that let several runs share one GPU (--beside). All 1,319 test
problems are answered greedily after training. Learning is compared, not time. Must: the table.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from arms import Arm, Figures, Record, keep, made_all, read_options
from on_par import PAGES_PER_ANSWER
from plot import bars

RANKS, SEEDS, UPDATES, FULL_LR, TIMES = (0, 1, 8, 32), (0, 1), 45, 3e-6, 10  # rank 0: all weights
SMALL = (
    "trainer.tokens_per_pack=4096",
    "generator.slots=512",
    f"generator.kv_pages={512 * PAGES_PER_ANSWER}",
    f"schedule.updates={UPDATES}",
    "evaluate.every=0",
    "snapshots.at_end=none",
)


def arm(rank: int, seed: int) -> Arm:
    adapters = (f"model.lora.rank={rank}", f"trainer.lr={TIMES * FULL_LR:g}") if rank else ()
    return Arm(f"lora_ranks/r{rank}-{seed}", (*SMALL, *adapters, f"seed={seed}"))


def read(record: Record) -> dict[str, Any]:
    last = max(record.metrics)
    names = ("adapter_effect", "adapter_served", "logprob_gap")
    shown = {name: row[name] for row in record.metrics.values() for name in names if name in row}
    return {
        "before": record.summary["eval_before"],
        "after": record.summary["eval_after"],
        "reward": record.metrics[last].get("reward"),
        "effective_sample_size": record.mean("effective_sample_size"),
        **shown,
    }


def main() -> None:
    options = read_options(__doc__)
    records = made_all({(rank, seed): arm(rank, seed) for rank in RANKS for seed in SEEDS}, options)
    runs = {pair: read(record) for pair, record in records.items()}
    table = {rank: [runs[rank, seed] for seed in SEEDS] for rank in RANKS}
    updates = min(record.summary["updates"] for record in records.values())
    print(f"{'':14} GSM8K after {updates} updates, by seed; mean")
    for rank, found in table.items():
        after = [run["after"] for run in found]
        print(f"{name_of(rank):14} {', '.join(f'{share:.1%}' for share in after)}; {mean(after):.1%}")
    rows = {
        name_of(rank): {"seeds": found, "mean": mean(run["after"] for run in found)} for rank, found in table.items()
    }
    before = mean(run["before"] for run in runs.values())
    keep("lora_ranks", options, {"updates": updates, "times_lr": TIMES, "before": before, "ranks": rows}, picture)


def name_of(rank: int) -> str:
    return f"LoRA, rank {rank}" if rank else "full training"


def picture(figures: Figures) -> str:
    values = {"before": figures["before"], **{name: row["mean"] for name, row in figures["ranks"].items()}}
    title = f"GSM8K after {figures['updates']} updates, mean of two seeds"
    return bars(title, "% right", {name: 100 * share for name, share in values.items()}, "%")


if __name__ == "__main__":
    main()
