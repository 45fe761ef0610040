"""Test programs that are several ranks of one group, on a CPU, or together on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from llamarl.process_groups import LOOPBACK, join_group, let_ranks_share_gpus

DEVICE = torch.device(os.environ.get("LLAMARL_TEST_DEVICE", "cpu"))


def run_ranks(module: str, count: int, *args: str, device: str = "cpu") -> None:
    """Run `python -m MODULE RANK COUNT ARGS` for every rank; an error of any fails the test."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LLAMARL_TEST_DEVICE": device}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(count), *args],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=200)
        assert rank.returncode == 0, said


def join_in(folder: Path, rank: int, count: int) -> None:
    """Join the group whose ranks find each other through a file in the folder."""
    torch.set_num_threads(1)
    let_ranks_share_gpus()
    join_group(lambda: FileStore(str(folder / "rendezvous"), count), rank, count, LOOPBACK)


def leave_group() -> NoReturn:
    """Wait for all ranks, then exit as executors do: torch may abort if an interpreter with a process group shuts down."""
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
