"""A world of many ranks of which only one is there: a process group whose collectives do nothing, and fake tensors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from llamarl.model.gpu_paths import rehearsing
from llamarl.rehearse.fused_graphs import fused_backend
from llamarl.rehearse.tracking import MemoryTracker

DEVICE = torch.device("cpu")  # what fake tensors say; nothing is computed there


@contextmanager
def fake_ranks(rank: int, count: int) -> Iterator[None]:
    """This process as one of `count` ranks, the others of which are not there. It runs the code of a GPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    log = logging.getLogger("torch.distributed.device_mesh")  # it warns of a second world in one process
    level = log.level
    log.setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        with rehearsing(fused_backend):
            yield
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
        log.setLevel(level)


@contextmanager
def fake_memory(tracker: MemoryTracker) -> Iterator[None]:
    """Tensors without memory, counted by `tracker`."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), tracker:
        # Code that asks whether two tensors are neighbors in memory finds that they are not.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield
