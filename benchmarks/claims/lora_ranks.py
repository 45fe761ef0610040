"""Claim 15: LoRA of rank 1, 8 and 32 at ten times the learning rate against full training, GSM8K, two seeds each.

    python benchmarks/claims/lora_ranks.py [--beside 4] [--at-most N] [KEY=VALUE ...]    # GSM8K with Qwen, on a GPU
    python benchmarks/claims/lora_ranks.py --small [KEY=VALUE ...]                       # arithmetic, on a CPU, three seeds

45 updates each, as the first third of claim 1, with packs that let several runs share one GPU (--beside). All 1,319 test
problems are answered greedily after training. Learning is compared, not time. Must: the table.
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from arms import ARITHMETIC, GSM8K, SMALL, Arm, Figures, Record, keep, made_all, read_options
from on_par import PAGES_PER_ANSWER
from plot import bars

RANKS, UPDATES, TIMES = (0, 1, 8, 32), 45, 10  # rank 0: all weights
SEVERAL = (  # of one GPU
    "trainer.tokens_per_pack=4096",
    "generator.slots=512",
    f"generator.kv_pages={512 * PAGES_PER_ANSWER}",
    f"schedule.updates={UPDATES}",
    "evaluate.every=0",
    "snapshots.at_end=none",
)


def arms(small: bool) -> dict[tuple[int, int], Arm]:
    """By rank and seed."""
    full_lr, seeds, settings = (3e-5, (0, 1, 2), SMALL) if small else (3e-6, (0, 1), SEVERAL)
    name, config = ("lora_ranks_small", ARITHMETIC) if small else ("lora_ranks", GSM8K)
    found: dict[tuple[int, int], Arm] = {}
    for rank in RANKS:
        adapters = (f"model.lora.rank={rank}", f"trainer.lr={TIMES * full_lr:g}") if rank else ()
        for seed in seeds:
            found[rank, seed] = Arm(f"{name}/r{rank}-{seed}", (*settings, *adapters, f"seed={seed}"), config)
    return found


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
    options = read_options(__doc__, small="arithmetic with the tiny model, three seeds")
    records = made_all(arms(options.small), options)
    table: dict[int, list[dict[str, Any]]] = {rank: [] for rank in RANKS}
    for (rank, _), record in records.items():
        table[rank].append(read(record))
    updates = min(record.summary["updates"] for record in records.values())
    task = "arithmetic, tiny model" if options.small else "GSM8K"
    print(f"{'':14} {task}, after {updates} updates, by seed; mean and deviation")
    rows: dict[str, Any] = {}
    for rank, found in table.items():
        after = [run["after"] for run in found]
        rows[name_of(rank)] = {"seeds": found, "mean": mean(after), "deviation": stdev(after)}
        by_seed = ", ".join(f"{share:.1%}" for share in after)
        print(f"{name_of(rank):14} {by_seed}; {mean(after):.1%} +- {100 * stdev(after):.1f}")
    before = mean(run["before"] for found in table.values() for run in found)
    keep(
        "lora_ranks",
        options,
        {"task": task, "updates": updates, "times_lr": TIMES, "before": before, "ranks": rows},
        picture,
    )


def name_of(rank: int) -> str:
    return f"LoRA, rank {rank}" if rank else "full training"


def picture(figures: Figures) -> str:
    values = {"before": figures["before"], **{name: row["mean"] for name, row in figures["ranks"].items()}}
    title = f"{figures['task']}: after {figures['updates']} updates, mean of the seeds"
    return bars(title, "% right", {name: 100 * share for name, share in values.items()}, "%")


if __name__ == "__main__":
    main()
