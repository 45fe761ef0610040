"""How a program that is one rank of several ends."""

from __future__ import annotations

import os
from typing import NoReturn

import torch.distributed as dist


def leave_group() -> NoReturn:
    """When all are done. As executors end: torch may abort while an interpreter with a process group is taken apart."""
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)
