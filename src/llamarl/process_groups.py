"""How torch process groups are formed: store, network interface and time-outs; and what their ranks agree on.

On one host, ranks find each other in a file without a name (a memfd) and talk over loopback: nothing is left behind, and no
other machine can connect. Between hosts, gloo and NCCL neither encrypt nor authenticate, so the user must name a trusted
network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo, Store

from llamarl.errors import ConfigError

LOOPBACK = "lo"
# Deadlines are kept by our own code. gloo closes the connection when a wait expires, so a time-out of its own would end ranks
# that merely had nothing to do.
NO_TIMEOUT = timedelta(days=365)


def store_in(fd: int, num_ranks: int) -> Store:
    """The rendezvous store of processes on one host that inherited this memfd."""
    return FileStore(f"/proc/self/fd/{fd}", num_ranks)


def let_ranks_share_gpus() -> None:
    """Make NCCL accept other ranks on this process's GPU. Each rank claims to be another host, so that NCCL takes its network
    transport: correct, but far slower than GPUs of their own. Call it before the first group is formed."""
    os.environ["NCCL_HOSTID"] = f"{os.uname().nodename}-{os.getpid()}"


def join_group(
    store: Callable[[], Store], rank: int, num_ranks: int, interface: str, *, nccl_interface: str = ""
) -> None:
    """Make this process a rank of the default group; with one rank, a no-op. NCCL looks for its interface once in the life of
    a process, so `nccl_interface` must serve every group that it will be in; empty: the same as for gloo."""
    if num_ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={nccl_interface or interface}"
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store(), rank=rank, world_size=num_ranks, timeout=NO_TIMEOUT)


def make_gloo_group(store: Store, rank: int, num_ranks: int, interface: str) -> ProcessGroupGloo:
    """A group beside the default one, for CPU tensors."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(interface=interface)]
    options._timeout = NO_TIMEOUT
    options._threads = 2
    return ProcessGroupGloo(store, rank, num_ranks, options)


def make_nccl_group(store: Store, rank: int, num_ranks: int, interface: str) -> Any:
    """A group beside the default one, for tensors on GPUs."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    from torch.distributed import ProcessGroupNCCL  # absent in builds without CUDA

    return ProcessGroupNCCL(store, rank, num_ranks, ProcessGroupNCCL.Options())


def interface_for(hosts: Sequence[str], trusted_network: str) -> str:
    """The interface that weights may use, or a refusal that says what to do."""
    if len(set(hosts)) <= 1:
        return LOOPBACK
    if not trusted_network:
        raise ConfigError(
            f"engine.trusted_network: weights would go from {hosts[0]} to {next(h for h in hosts if h != hosts[0])} over "
            "gloo or NCCL, which neither encrypt nor ask who is there; name the interface of a network that you trust"
        )
    return trusted_network


def broadcast_bytes(data: bytes = b"") -> bytes:
    """The bytes that rank 0 passes, on every rank; what other ranks pass is ignored. No object is ever pickled."""
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0)
    if not length.item():
        return b""
    if dist.get_rank() == 0:
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0)
        return data
    received = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.broadcast(received, src=0)
    return received.numpy().tobytes()


def max_over_ranks(values: Tensor) -> None:
    """Replace every element by its largest value on any rank."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)


def true_on_all_ranks(mine: bool) -> bool:
    flags = torch.tensor([int(mine)])
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return bool(flags.item())
