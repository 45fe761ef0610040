"""Descriptors that wait in a socket for whoever needs them, so that memory outlives the process that made it.

The slot file's socket pair holds one letter: a list of numbers with a descriptor for each. Readers look at it without
taking it out, and the kernel gives each a descriptor of its own. The letter stays when its sender dies, nobody listens, and
all is gone with the last process that holds the sockets.
"""

from __future__ import annotations

import array
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import Struct

from llamarl.errors import StaleWeights
from llamarl.weights.slot_file import MAIL_LOCK, MAX_RANKS, SlotFile

_MAX_LETTER = 1 << 16


class DescriptorList(Struct, frozen=True):
    number: int = 0  # of nanoseconds on the clock that all processes share: the newest is the largest
    memories: dict[int, int] = {}  # rank -> the number of its memory; descriptors come in the same order


_decode = msgspec.msgpack.Decoder(DescriptorList).decode


def post(file: SlotFile, rank: int, memory: int, fd: int) -> None:
    """Put a rank's memory into the letter, in the place of the one it had. The new letter is there before the old goes."""
    with file.locked(MAIL_LOCK), _socket(file.mail_in) as outgoing, _socket(file.mail_out) as box, _peek(box) as found:
        letter, fds = found
        held = {**dict(zip(letter.memories, fds, strict=True)), rank: fd}
        new = DescriptorList(time.monotonic_ns(), {**letter.memories, rank: memory})
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [held[one] for one in new.memories]))
        outgoing.sendmsg([msgspec.msgpack.encode(new)], [rights], socket.MSG_DONTWAIT)
        while _first_number(box) < new.number:
            box.recv(1, socket.MSG_DONTWAIT)  # the descriptors in it are closed


def find(file: SlotFile, memory: int) -> int:
    """A descriptor of this memory; the caller closes it."""
    with file.locked(MAIL_LOCK), _socket(file.mail_out) as box, _peek(box) as (letter, fds):
        for number, fd in zip(letter.memories.values(), fds, strict=True):
            if number == memory:
                return os.dup(fd)
    raise StaleWeights("weights: the memory of their slot is gone")


def _first_number(box: socket.socket) -> int:
    return _decode(box.recv(_MAX_LETTER, socket.MSG_PEEK | socket.MSG_DONTWAIT)).number


@contextmanager
def _peek(box: socket.socket) -> Iterator[tuple[DescriptorList, list[int]]]:
    """The letter and copies of its descriptors, which last as long as the context."""
    fds = array.array("i")
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, _, _ = box.recvmsg(_MAX_LETTER, socket.CMSG_LEN(MAX_RANKS * fds.itemsize), flags)
    except BlockingIOError:
        data, ancillary = msgspec.msgpack.encode(DescriptorList()), []
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    try:
        yield _decode(data), list(fds)
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def _socket(fd: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor that stays open after it."""
    end = socket.socket(fileno=fd)
    try:
        yield end
    finally:
        end.detach()
