"""Weight slots in shared memory: two per writer, so that one can be written while the other is read.

A slot lives in a memfd, which has no name and goes with its last process, so nothing can be left behind. A lease is a
kernel record lock on one byte of that file: it cannot outlive its holder. The writer marks a slot invalid, fills it, and
only then writes the version, so a publication is visible whole or not at all; the optimizer never writes in a slot, and
nobody computes from one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from llamarl.errors import CorruptWeights, LeaseTimeout, StaleWeights
from llamarl.layout import FlatLayout, TensorSpec, flat_layout
from llamarl.weights.blocks import Part, checksum_of, copy_in, copy_out
from llamarl.weights.transport import Publication

NUM_SLOTS = 2
_PAGE = 4096
_HEADER = struct.Struct("<qq32s")  # version, bytes, checksum
_NO_VERSION = -1
_POLL_S = 0.001


class SlotFile:
    """The memory itself. Created empty before any process is forked; the first to know the layout gives it its size."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("llamarl-weights", os.MFD_CLOEXEC) if fd is None else fd
        self._map: mmap.mmap | None = None

    def bytes_of_slot(self, slot: int, layout: FlatLayout) -> Tensor:
        stride = -(-layout.num_bytes // _PAGE) * _PAGE
        size = _PAGE + NUM_SLOTS * stride
        if self._map is None:
            if os.fstat(self.fd).st_size < size:
                os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        start = _PAGE + slot * stride
        return torch.frombuffer(memoryview(self._map)[start : start + layout.num_bytes], dtype=torch.uint8)

    def read_header(self, slot: int) -> tuple[int, int, bytes]:
        data = os.pread(self.fd, _HEADER.size, slot * _HEADER.size)
        if len(data) < _HEADER.size:
            return _NO_VERSION, 0, b""  # nothing was ever published
        version, num_bytes, checksum = _HEADER.unpack(data)
        return (version, num_bytes, checksum) if num_bytes else (_NO_VERSION, 0, b"")

    def write_header(self, slot: int, version: int, num_bytes: int, checksum: bytes) -> None:
        os.pwrite(self.fd, _HEADER.pack(version, num_bytes, checksum), slot * _HEADER.size)

    @contextmanager
    def lease(self, slot: int) -> Iterator[None]:
        """A reader's hold on a slot: while it lasts, the writer does not touch it."""
        fcntl.lockf(self.fd, fcntl.LOCK_SH, 1, slot)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, slot)

    @contextmanager
    def exclusive(self, slot: int, lease_s: float, on_stuck: Callable[[int], None]) -> Iterator[None]:
        """The writer's hold. A reader that keeps its lease too long is reported by pid, never overwritten."""
        deadline, reports = time.monotonic() + lease_s, 0
        while not self._try_lock(slot):
            if time.monotonic() > deadline:
                pid = self._holder(slot)
                reports += 1
                if reports > 2:
                    raise LeaseTimeout(f"process {pid} keeps its lease on weight slot {slot} for over {lease_s} s")
                on_stuck(pid)
                deadline = time.monotonic() + lease_s
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, slot)

    def _try_lock(self, slot: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except OSError:
            return False
        return True

    def _holder(self, slot: int) -> int:
        query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
        pid: int = struct.unpack("hhqqi4x", fcntl.fcntl(self.fd, fcntl.F_GETLK, query))[4]
        return pid

    def close(self) -> None:
        self._map = None
        os.close(self.fd)


class SlotWriter:
    """The trainer's side."""

    def __init__(
        self,
        file: SlotFile,
        parameters: Mapping[str, Tensor],
        *,
        lease_s: float,
        on_stuck: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._file, self._parameters = file, dict(parameters)
        self._layout = layout_of(parameters)
        self._lease_s, self._on_stuck = lease_s, on_stuck

    @torch.no_grad()
    def publish(self, version: int) -> Publication:
        slot = version % NUM_SLOTS
        before, _, checksum_before = self._file.read_header(slot)
        with self._file.exclusive(slot, self._lease_s, self._on_stuck):
            self._file.write_header(slot, _NO_VERSION, self._layout.num_bytes, b"")
            checksum = self._fill(self._file.bytes_of_slot(slot, self._layout))
            self._file.write_header(slot, version, self._layout.num_bytes, checksum)
        changed = before != version or checksum != checksum_before
        return Publication(version, checksum.hex(), self._layout.num_bytes, changed)

    def _fill(self, data: Tensor) -> bytes:
        plain, others = split(self._parameters, data, self._layout)
        for parameter, view in others:
            view.copy_(parameter)
        return copy_in(data.numpy(), plain, torch.get_num_threads())


class SlotReader:
    """The generator's side."""

    def __init__(self, file: SlotFile, parameters: Mapping[str, Tensor]) -> None:
        self._file, self._parameters = file, dict(parameters)
        self._layout = layout_of(parameters)

    @torch.no_grad()
    def load(self, version: int) -> int:
        slot = version % NUM_SLOTS
        with self._file.lease(slot):
            found, num_bytes, checksum = self._file.read_header(slot)
            if found != version:
                raise StaleWeights(f"weights: version {version} is not in its slot any more")
            if num_bytes != self._layout.num_bytes:
                raise CorruptWeights(f"weights: version {version} has {num_bytes} bytes, not {self._layout.num_bytes}")
            self._copy(self._file.bytes_of_slot(slot, self._layout), checksum, version)
        return num_bytes

    def _copy(self, data: Tensor, checksum: bytes, version: int) -> None:
        threads = torch.get_num_threads()
        if checksum_of(data.numpy(), threads) != checksum:
            raise CorruptWeights(f"weights: version {version} does not match its checksum")
        plain, others = split(self._parameters, data, self._layout)
        copy_out(data.numpy(), plain, threads)
        for parameter, view in others:
            parameter.copy_(view)


def layout_of(parameters: Mapping[str, Tensor]) -> FlatLayout:
    return flat_layout(
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in parameters.items()
    )


def split(
    parameters: Mapping[str, Tensor], data: Tensor, layout: FlatLayout
) -> tuple[list[Part], list[tuple[Tensor, Tensor]]]:
    """Parameters that lie in memory as they do in the slot, as bytes; the others, each with its view of the slot."""
    plain: list[Part] = []
    others: list[tuple[Tensor, Tensor]] = []
    for placed in layout.tensors:
        spec, parameter = placed.spec, parameters[placed.spec.name].detach()
        if parameter.is_cpu and parameter.is_contiguous():
            plain.append((placed.offset, parameter.view(-1).view(torch.uint8).numpy()))
        else:
            raw = data[placed.offset : placed.offset + spec.num_bytes]
            others.append((parameter, raw.view(parameter.dtype).view(spec.shape)))
    return plain, others
