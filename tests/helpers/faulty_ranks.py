"""Generators of two ranks in which one rank does something else than the other. Self-contained, as children load this file
by its path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from llamarl.builders import generator
from llamarl.builders.context import BuildContext
from llamarl.executors.executor import Executor
from llamarl.generate.parallel import TensorRank
from llamarl.model.shards import Shard
from llamarl.model.transformer import Transformer

SKIPPED_ONCE = "LLAMARL_TEST_SKIPPED_ONCE"  # environment variable with the path of a file that the deed leaves behind
_SKIPPED = 20  # number of the all-reduce that is skipped


def skipping_generator(context: BuildContext) -> Executor:
    """In its first life, rank 1 takes no part in one all-reduce."""
    done = Path(os.environ[SKIPPED_ONCE])
    if context.rank == 1 and not done.exists():
        done.touch()
        honest, calls = dist.all_reduce, iter(range(1 << 30))

        def skipping(*args: Any, **settings: Any) -> Any:
            return None if next(calls) == _SKIPPED else honest(*args, **settings)

        setattr(dist, "all_reduce", skipping)  # noqa: B010
    return generator.build_generator(context)


def generator_with_a_wrong_slice(context: BuildContext) -> Executor:
    """Both ranks read the same part of one matrix."""
    honest = generator.held_shards

    def wrong(model: Transformer, part: TensorRank) -> dict[str, Shard]:
        held = honest(model, part)
        name = next(name for name in held if name.endswith("down_proj.weight"))
        return {**held, name: Shard(held[name].tensor, honest(model, TensorRank(0, part.count))[name].box)}

    with patch.object(generator, "held_shards", wrong):
        return generator.build_generator(context)


def generator_with_shifted_experts(context: BuildContext) -> Executor:
    """Rank 1 takes its experts for those whose numbers are one lower."""
    honest = TensorRank.first_expert

    def wrong(part: TensorRank, experts: int) -> int:
        return honest(part, experts) - part.rank

    with patch.object(TensorRank, "first_expert", wrong):
        return generator.build_generator(context)
