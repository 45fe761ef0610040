"""What RL alone cannot start, it can after SFT. SmolLM2-135M-Instruct on GSM8K: mean reward of RL from the model itself, and
from the model after three passes over the worked solutions.

    python benchmarks/claims/sft_then_rl.py [--runs FOLDER] [KEY=VALUE ...]        # e.g. task.path=FOLDER_WITH_THE_DATA

The SFT is examples/smollm2_gsm8k_sft.yaml, both RL runs are examples/smollm2_gsm8k_rl.yaml. Must: the reward of the
first is near 0 to its end, that of the second rises well above it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from arms import ROOT, TINY_DATA, Arm, Figures, Record, keep, made, read_options, side_by_side
from learns import smoothed_reward
from plot import lines

EXAMPLES = ROOT / "examples"
NEAR_ZERO, LEAST_RISE, LAST = 0.02, 0.02, 10  # shares right; updates that are averaged


def main() -> None:
    options = read_options(__doc__)
    options.expect("smollm2_sft", "smollm2_rl_alone", "smollm2_rl_after")
    data = [f"sft.path={options.chosen('task.path', 'data/gsm8k')}"]
    if options.tiny:  # a few rows, again and again
        data = [f"sft.path={TINY_DATA / 'gsm8k'}", "sft.epochs=0"]
    sft = made(Arm("smollm2_sft", tuple(data), EXAMPLES / "smollm2_gsm8k_sft.yaml"), options)
    config = EXAMPLES / "smollm2_gsm8k_rl.yaml"
    begun = Arm("smollm2_rl_after", config=config).beginning_with((sft.folder / sft.summary["policy"]).absolute())
    others = replace(options, settings=tuple(one for one in options.settings if not one.startswith("model.path=")))
    chains = [partial(made, Arm("smollm2_rl_alone", config=config), options), partial(made, begun, others)]
    alone, after = side_by_side(chains, options)
    found = {name: _rewards(record) for name, record in (("alone", alone), ("after", after))}
    for name, (first, last) in found.items():
        print(f"RL {name + ' SFT' if name == 'after' else name:9}  mean reward {first:.3f} -> {last:.3f}")
    print(f"test accuracy: {_accuracy(sft)} by SFT, {_accuracy(after)} by RL after it, {_accuracy(alone)} by RL alone")
    figures = {
        "rewards": found,
        "accuracy": {name: sorted(one.accuracy.items()) for name, one in _named(sft, alone, after)},
        "sft_loss": [row["sft_loss"] for _, row in sorted(sft.metrics.items())],
        "met": found["alone"][1] <= NEAR_ZERO and found["after"][1] - found["after"][0] >= LEAST_RISE,
        "reward_alone": smoothed_reward(alone),
        "reward_after": smoothed_reward(after),
    }
    keep("sft_then_rl", options, figures, picture)


def _named(*records: Record) -> list[tuple[str, Record]]:
    return [(record.folder.name, record) for record in records]


def _rewards(record: Record) -> tuple[float, float]:
    """Mean reward of the first updates, and of the last."""
    rewards = [row["reward"] for _, row in sorted(record.metrics.items()) if "reward" in row]
    return sum(rewards[:LAST]) / LAST, sum(rewards[-LAST:]) / LAST


def _accuracy(record: Record) -> str:
    found = [value for _, value in sorted(record.accuracy.items())]
    return f"{found[0]:.1%} -> {found[-1]:.1%}"


def picture(figures: Figures) -> str:
    series = {"after SFT": figures["reward_after"], "alone": figures["reward_alone"]}
    return lines("SmolLM2-135M on GSM8K: RL after SFT, and alone", "minutes of RL", "mean reward", series, ())


if __name__ == "__main__":
    main()
