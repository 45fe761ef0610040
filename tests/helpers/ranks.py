"""Test programs that are several ranks of one group, on a CPU, or together on one GPU."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from llamarl.process_groups import LOOPBACK, join_group, let_ranks_share_gpus

DEVICE = torch.device(os.environ.get("LLAMARL_TEST_DEVICE", "cpu"))


# With torch 2.13 gloo finds its heap damaged once in a hundred runs of some tests: a core shows its own thread, in malloc,
# and nothing of ours on a CPU is native. Executors that die of it are started again; so are test programs, once.
_CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}


def run_ranks(module: str, count: int, *args: str, device: str = "cpu") -> None:
    """Call MODULE's `main(RANK, COUNT, *ARGS)` in a process for every rank; an error of any fails the test."""
    folders = [Path(one) for one in args if Path(one).is_dir()]
    before = {path for folder in folders for path in folder.rglob("*")}
    codes = _exit_codes(module, count, args, device)
    if not _CRASHES.isdisjoint(codes):
        warnings.warn(f"ranks of {module} {args} crashed ({codes}) and were run again", stacklevel=2)
        for path in sorted({path for folder in folders for path in folder.rglob("*")} - before, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        codes = _exit_codes(module, count, args, device)
    assert not any(codes), f"ranks ended with {codes}; what they said is in the captured stderr"


def _exit_codes(module: str, count: int, args: tuple[str, ...], device: str) -> list[int]:
    """How the ranks ended. Those that wait for one which died are killed."""
    forks, end_s = _fork_server(device), time.monotonic() + 200
    ranks = [forks.Process(target=_run, args=(module, rank, count, *args), daemon=True) for rank in range(count)]
    for rank in ranks:
        rank.start()
    try:
        while (left := [rank for rank in ranks if rank.exitcode is None]) and time.monotonic() < end_s:
            wait([rank.sentinel for rank in left], timeout=end_s - time.monotonic())
            if any(rank.exitcode for rank in ranks):
                end_s = min(end_s, time.monotonic() + 10)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return [rank.exitcode or 0 for rank in ranks]


@cache
def _fork_server(device: str) -> ForkServerContext:
    """A process that has imported what ranks run, which takes five seconds of a core, and is forked for each rank. There is
    one for all tests of a session, whose ranks are all on this device."""
    assert _fork_server.cache_info().currsize == 0, "DEVICE is fixed when the programs are imported"
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "LLAMARL_TEST_DEVICE": device}
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(
        ["helpers.trainer_rank", "helpers.tensor_rank", "torch.distributed.fsdp", "torch._dynamo"]
    )
    return forks


def _run(module: str, rank: int, count: int, *args: str) -> None:
    importlib.import_module(module).main(rank, count, *args)


def join_in(folder: Path, rank: int, count: int) -> None:
    """Join the group whose ranks find each other through a file in the folder."""
    torch.set_num_threads(1)
    let_ranks_share_gpus()
    join_group(lambda: FileStore(str(folder / "rendezvous"), count), rank, count, LOOPBACK)


def leave_group() -> NoReturn:
    """Wait for all ranks, then exit as executors do: torch may abort if an interpreter with a process group shuts down."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)
