"""Memory that is written once, by the first process that needs it, and then mapped by all that do; nobody can write it again.

It is on a device or in host memory, and its descriptor lies in the mailbox of the job's slot file: it outlives all of its
users, and is gone with the job. A process that dies while it writes leaves nothing, and the next one begins anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from llamarl.errors import StaleWeights
from llamarl.weights import fd_mailbox
from llamarl.weights.cuda_driver import Mapping, allocate
from llamarl.weights.slot_file import ONCE_LOCK, SlotFile

HOST_NAME = "llamarl-base"  # in /proc/PID/smaps
_SEALS = 0x2 | 0x4 | 0x10  # F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE
Fill = Callable[[Tensor], object]  # writes all bytes


def shared_memory(file: SlotFile, name: str, device: torch.device, num_bytes: int, fill: Fill) -> Tensor:
    """The bytes of this name on this device, which may only be read. Whoever comes first fills them, the others wait."""
    number = _number(f"{name}/{device}/{num_bytes}")
    with file.locked(ONCE_LOCK):
        try:
            fd = fd_mailbox.find(file, number)
        except StaleWeights:
            fd = _create(device, num_bytes, fill)
            fd_mailbox.store(file, number, number, fd)
    return _mapped(fd, device, num_bytes)


def private_memory(device: torch.device, num_bytes: int, fill: Fill) -> Tensor:
    """Bytes of the same kind that no other process finds."""
    return _mapped(_create(device, num_bytes, fill), device, num_bytes)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 2 | 1


def _create(device: torch.device, num_bytes: int, fill: Fill) -> int:
    """A descriptor of new memory, which nobody can write any more."""
    on_gpu = device.type == "cuda"
    fd = allocate(device.index, num_bytes, what="the frozen base of the model") if on_gpu else _allocate_host(num_bytes)
    try:
        _fill_device(fd, device, num_bytes, fill) if on_gpu else _fill_host(fd, num_bytes, fill)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _allocate_host(num_bytes: int) -> int:
    fd = os.memfd_create(HOST_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return fd


def _fill_host(fd: int, num_bytes: int, fill: Fill) -> None:
    fill(torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # from now on, the kernel refuses to map it for writing


def _fill_device(fd: int, device: torch.device, num_bytes: int, fill: Fill) -> None:
    mapping = Mapping(fd, device.index, num_bytes, [device.index])
    try:
        fill(mapping.tensor())
        torch.cuda.synchronize(device)
    finally:
        mapping.close()


def _mapped(fd: int, device: torch.device, num_bytes: int) -> Tensor:
    """The memory, mapped for reading until this process ends. A write to it ends the process, or its use of the GPU."""
    try:
        if device.type == "cuda":
            return Mapping(fd, device.index, num_bytes, [device.index], read_only=True).tensor()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that it cannot be written, which is what we want
            return torch.frombuffer(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ), dtype=torch.uint8)
    finally:
        os.close(fd)
