"""Several optimizer steps from one batch: how often it is passed over, and into how many parts each pass is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Part = Sequence[int]  # numbers of documents


@dataclass(frozen=True)
class UpdatePasses:
    """`epochs` passes over the documents of an update, with `minibatches` optimizer steps in each."""

    epochs: int = 1
    minibatches: int = 1
    seed: int = 0

    def parts(self, update: int, num_documents: int) -> Iterator[list[Part | None]]:
        """The parts of each pass, which together are all documents; None: all of them at once. Who is in which part follows
        from the seed, the update and the pass alone. There are never more parts than documents."""
        count = min(self.minibatches, num_documents)
        for epoch in range(self.epochs):
            if count == 1:
                yield [None]
            else:
                order = np.random.default_rng([self.seed, update, epoch]).permutation(num_documents)
                yield [sorted(part.tolist()) for part in np.array_split(order, count)]


def merge_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What the optimizer steps of an update say of themselves, together: means, and whether one of them was skipped."""
    if len(steps) == 1:
        return dict(steps[0])
    found = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return {**found, "skipped": max(step["skipped"] for step in steps), "optimizer_steps": float(len(steps))}
