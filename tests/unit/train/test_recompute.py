"""Blocks that are computed again from parts of their input give the same gradients, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from helpers.training import CPU, cpu_learner, make_test_documents
from torch import Tensor
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from llamarl.train.mesh import make_mesh

RANKS = 2
DOCUMENTS = make_test_documents(6)


@pytest.fixture
def threads_are_ranks() -> Iterator[None]:
    _install_threaded_pg()  # type: ignore[no-untyped-call]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    yield
    torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    _uninstall_threaded_pg()  # type: ignore[no-untyped-call]


def on_all_ranks(work: Callable[[int], object]) -> list[object]:
    store = dist.HashStore()
    found: list[object] = [None] * RANKS

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=RANKS, store=store)
        try:
            found[rank] = work(rank)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def gradients(recompute: str) -> Callable[[int], dict[str, Tensor]]:
    def compute(rank: int) -> dict[str, Tensor]:
        learner = cpu_learner(mesh=make_mesh(1, RANKS, rank, CPU), recompute=recompute)
        learner.accumulate(DOCUMENTS)
        return learner.optimizer.gradients()

    return compute


@pytest.mark.usefixtures("threads_are_ranks")
def test_blocks_computed_again_from_parts_give_the_same_bits() -> None:
    for plain, thrifty in zip(on_all_ranks(gradients("none")), on_all_ranks(gradients("full")), strict=True):
        assert isinstance(plain, dict) and isinstance(thrifty, dict)
        assert plain.keys() == thrifty.keys()
        assert all(torch.equal(plain[name], thrifty[name]) for name in plain)
