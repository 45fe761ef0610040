"""Reading a run, live or afterwards: `python examples/read_a_run.py RUN`

Prints how the run is doing, how reward and accuracy went, how far the policy had moved away from the one that sampled, and
the group of the newest update whose rewards differ most.
"""

from __future__ import annotations

import statistics
import sys

import numpy as np

from llamarl import Run


def main(folder: str) -> None:
    run = Run(folder)
    print(f"{run.state}: {run.updates} of {run.config.schedule.updates} updates in {run.wall_s:.0f} s")
    metrics = run.metrics()
    if not run.updates:
        return
    print(f"reward {metrics['reward'][0]:.3f} -> {metrics['reward'][-1]:.3f}")
    for point in run.evaluations():
        print(f"version {point.version}: {run.config.score_name} {point.accuracy:.3f}")

    rollouts = run.rollouts
    newest = rollouts.updates[-1]
    moved = [
        rollout.policy_logprobs - rollout.behavior_logprobs
        for group in rollouts.groups(newest)
        for rollout in group.rollouts
        if rollout.status == "trained"
    ]
    if moved:
        print(f"update {newest}: log-probs moved by {np.nanmean(np.abs(np.concatenate(moved))):.4f} on average")

    places = [place for place in rollouts.places(newest) if place.rewards]  # without reading any group
    mixed = max(places, key=lambda place: statistics.pvariance(place.rewards))
    group = rollouts.read(mixed)
    print(f"group {group.ordinal}: {group.prompt!r}, expected {group.answer!r}")
    for rollout in group.rollouts:
        print(f"  reward {rollout.reward:g}, advantage {rollout.advantage:+.3f}: {rollout.text!r}")


if __name__ == "__main__":
    main(sys.argv[1])
