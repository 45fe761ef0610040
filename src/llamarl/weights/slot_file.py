"""The file behind the weight slots of one role: versions, leases, and the memory of slots in host memory.

It is a memfd, which has no name and is gone with its last process, so nothing can be left behind. Each rank that publishes
has a record at the start of the file and its own region behind the records. A lease is a kernel record lock on a byte of
this file: it cannot outlive its holder.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import Struct

from llamarl.errors import LeaseTimeout

NUM_SLOTS = 2
MAX_RANKS = 64  # ranks that publish, on one host
PAGE = 4096
NO_VERSION = -1
_RECORD = 256
_RANK = struct.Struct("<qqqqq")  # ranks, offset and bytes of the region, bytes of the manifest, memory
_HEADER = struct.Struct("<qqq32s")  # version + 1, bytes, edition, checksum
_FIRST_REGION = MAX_RANKS * _RECORD
REGION_LOCK = NUM_SLOTS * MAX_RANKS
MAILBOX_LOCK = REGION_LOCK + 1
ONCE_LOCK = MAILBOX_LOCK + 1
_POLL_S = 0.001


class Header(Struct, frozen=True, array_like=True):
    """State of one rank's slot. Ranks that publish together write the same edition."""

    version: int = NO_VERSION
    num_bytes: int = 0
    edition: int = 0
    checksum: bytes = b""


class RankRecord(Struct, frozen=True, array_like=True):
    """Where one rank's region is."""

    num_ranks: int = 0  # 0: this rank has never published
    offset: int = 0
    num_bytes: int = 0
    manifest_bytes: int = 0
    memory: int = 0  # number that identifies the rank's device memory


class SlotFile:
    """Created empty before any process is forked; a rank that publishes reserves its region. `fds` are passed to children."""

    def __init__(self, fds: Sequence[int] | None = None) -> None:
        if fds is None:
            mailbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fds = [os.memfd_create("llamarl-weights", os.MFD_CLOEXEC), *(end.detach() for end in mailbox)]
        self.fds = tuple(fds)
        self.fd, self.mailbox_in, self.mailbox_out = self.fds

    @classmethod
    def by_role(cls, roles: Sequence[str], fds: Sequence[int]) -> dict[str, SlotFile]:
        """Slot files of several roles, from their descriptors one after the other."""
        each = len(fds) // max(1, len(roles))
        return {role: cls(fds[index * each : (index + 1) * each]) for index, role in enumerate(roles)}

    # Records

    def read_rank(self, rank: int) -> RankRecord:
        return RankRecord(*self._read(_RANK, rank * _RECORD))

    def write_rank(self, rank: int, record: RankRecord) -> None:
        os.pwrite(self.fd, _RANK.pack(*msgspec.structs.astuple(record)), rank * _RECORD)

    def read_header(self, slot: int, rank: int = 0) -> Header:
        number, num_bytes, edition, checksum = self._read(_HEADER, self._header_at(slot, rank))
        return Header(number - 1, num_bytes, edition, checksum)  # a new file is all zeros: no version

    def write_header(self, slot: int, rank: int, header: Header) -> None:
        data = _HEADER.pack(header.version + 1, header.num_bytes, header.edition, header.checksum)
        os.pwrite(self.fd, data, self._header_at(slot, rank))

    def _header_at(self, slot: int, rank: int) -> int:
        return rank * _RECORD + _RANK.size + slot * _HEADER.size

    def _read(self, form: struct.Struct, at: int) -> tuple[Any, ...]:
        return form.unpack(os.pread(self.fd, form.size, at).ljust(form.size, b"\0"))

    # Regions

    def reserve(self, rank: int, num_bytes: int) -> int:
        """Offset of this rank's region. A restarted rank gets its old region, if that is large enough."""
        known = self.read_rank(rank)
        if known.num_ranks and known.num_bytes >= num_bytes:
            return known.offset
        with self.locked(REGION_LOCK):
            offset = max(_FIRST_REGION, -(-os.fstat(self.fd).st_size // PAGE) * PAGE)
            os.ftruncate(self.fd, offset + num_bytes)
        return offset

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self.fd, num_bytes, offset)

    def write_at(self, offset: int, data: bytes) -> None:
        os.pwrite(self.fd, data, offset)

    def map(self, offset: int, num_bytes: int) -> mmap.mmap:
        return mmap.mmap(self.fd, num_bytes, offset=offset)

    # Leases

    @contextmanager
    def lease(self, slot: int) -> Iterator[None]:
        """A reader's lock on a slot of all ranks: while it lasts, no writer touches the slot."""
        fcntl.lockf(self.fd, fcntl.LOCK_SH, MAX_RANKS, slot * MAX_RANKS)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, MAX_RANKS, slot * MAX_RANKS)

    @contextmanager
    def try_lease(self, slot: int) -> Iterator[bool]:
        """A lease if it is free at once; yields whether it was."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB, MAX_RANKS, slot * MAX_RANKS)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, MAX_RANKS, slot * MAX_RANKS)

    @contextmanager
    def exclusive(self, slot: int, rank: int, lease_s: float, on_stuck: Callable[[int], None]) -> Iterator[None]:
        """A writer's lock. A reader that keeps its lease too long is reported by pid; its slot is never overwritten."""
        byte = slot * MAX_RANKS + rank
        deadline, reports = time.monotonic() + lease_s, 0
        while not self._try_lock(byte):
            if time.monotonic() > deadline:
                pid = self._holder(byte)
                reports += 1
                if reports > 2:
                    raise LeaseTimeout(f"process {pid} keeps its lease on weight slot {slot} for over {lease_s} s")
                on_stuck(pid)
                deadline = time.monotonic() + lease_s
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, byte)

    @contextmanager
    def locked(self, byte: int) -> Iterator[None]:
        """Lock for changes of regions or of the mailbox, never held for long; or for what is made once."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, byte)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, byte)

    def _try_lock(self, byte: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True

    def _holder(self, byte: int) -> int:
        query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        pid: int = struct.unpack("hhqqi4x", fcntl.fcntl(self.fd, fcntl.F_GETLK, query))[4]
        return pid

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
