"""Reward rises on puzzles that nobody here wrote: sets of reasoning-gym, each learned alone, held-out puzzles before and
after.

    pip install 'llamarl[reasoning-gym]'
    python benchmarks/claims/environments.py [--runs FOLDER] [--at-most N] [KEY=VALUE ...]   # e.g. model.path=FOLDER

Every arm is examples/reasoning_gym.yaml with one set, a model folder that is there already, and fewer updates: made for some
three minutes each on one H200 with Qwen2.5-Coder-1.5B-Instruct. Held-out puzzles are answered greedily and scored by the
set's own rule. Must: on two sets the mean held-out reward rises by at least 0.05 and by more than twice its standard error.
`--at-most 1` makes one run a command.
"""

from __future__ import annotations

import math

from arms import ROOT, Arm, Figures, Record, keep, made_all, read_options
from learns import smoothed_reward
from plot import lines

MUST, MUST_ERRORS, MUST_SETS = 0.05, 2.0, 2
PUZZLES = 256
MODEL = "model.path=models/qwen2.5-coder-1.5b"
SETS = {
    "countdown": "{min_numbers: 3, max_numbers: 3, min_value: 1, max_value: 20, min_target: 5, max_target: 60}",
    "spell_backward": "{min_word_len: 3, max_word_len: 7}",
}


def arm(name: str) -> Arm:
    settings = (
        MODEL,
        f"task.datasets={{{name}: 1}}",
        f"task.options={{{name}: {SETS[name]}}}",
        "generator.slots=512",
        "trainer.lr=3e-6",
        "trainer.warmup_updates=5",
        "schedule.updates=60",
        "schedule.dynamic_sampling=0",
        f"evaluate.prompts={PUZZLES}",
        "evaluate.every=30",
        "snapshots.every=0",
        "snapshots.at_end=none",
    )
    return Arm(f"environments-{name}", settings, ROOT / "examples" / "reasoning_gym.yaml")


def read(record: Record) -> Figures:
    """What one set came to."""
    rewards = dict(sorted(record.accuracy.items()))
    before, after = rewards[min(rewards)], rewards[max(rewards)]
    error = math.sqrt(2 * 0.25 / PUZZLES)  # at most, as if all rewards were 0 or 1, and both evaluations independent
    return {
        "held_out": [(record.minutes(version), reward) for version, reward in rewards.items()],
        "gain": after - before,
        "standard_error": error,
        "met": after - before >= max(MUST, MUST_ERRORS * error),
        "reward": smoothed_reward(record),
        "summary": record.summary,
    }


def main() -> None:
    options = read_options(__doc__)
    if options.tiny:  # the sets are what is tried
        options.settings = (*options.settings, "task.kind=reasoning_gym")
    found = {name: read(record) for name, record in made_all({name: arm(name) for name in SETS}, options).items()}
    print("set             held-out before  after   gain  (standard error at most)")
    for name, one in found.items():
        print(
            f"{name:15} {one['held_out'][0][1]:15.3f} {one['held_out'][-1][1]:6.3f} {one['gain']:+6.3f}  "
            f"({one['standard_error']:.3f})"
        )
    met = sum(one["met"] for one in found.values()) >= MUST_SETS
    print(f"reward rises on two sets: {'yes' if met else 'NO'}")
    keep("environments", options, {"sets": found, "met": met}, picture)


def picture(figures: Figures) -> str:
    series = {name: one["held_out"] for name, one in figures["sets"].items()}
    title = "Qwen2.5-Coder-1.5B on sets of reasoning-gym"
    return lines(title, "minutes of training", "mean held-out reward", series, tuple(series)[:2])


if __name__ == "__main__":
    main()
