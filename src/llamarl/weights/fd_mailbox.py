"""A mailbox of file descriptors, so that memory outlives the process that made it.

The slot file's socket pair holds one message: a list of numbers with a descriptor for each. Readers peek at it without taking
it out, and the kernel gives each of them its own descriptors. The message stays when its sender dies, no process has to
listen, and everything is gone with the last process that holds the sockets.
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
from llamarl.weights.slot_file import MAILBOX_LOCK, MAX_RANKS, SlotFile

_MAX_MESSAGE = 1 << 16
_MAX_MEMORIES = 2 * MAX_RANKS  # one of each rank, and what is shared besides


class DescriptorList(Struct, frozen=True):
    """The message. Its descriptors come in the order of `memories`."""

    number: int = 0  # nanoseconds of the clock that all processes share: the newest message has the largest
    memories: dict[int, int] = {}  # rank, or another number of its owner -> the number of its memory


_decode = msgspec.msgpack.Decoder(DescriptorList).decode


def store(file: SlotFile, rank: int, memory: int, fd: int) -> None:
    """Puts a rank's memory into the message, in place of its old one. The new message is there before the old one goes."""
    with (
        file.locked(MAILBOX_LOCK),
        _socket(file.mailbox_in) as sender,
        _socket(file.mailbox_out) as receiver,
        _peek(receiver) as (old, fds),
    ):
        held = {**dict(zip(old.memories, fds, strict=True)), rank: fd}
        new = DescriptorList(time.monotonic_ns(), {**old.memories, rank: memory})
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [held[one] for one in new.memories]))
        sender.sendmsg([msgspec.msgpack.encode(new)], [rights], socket.MSG_DONTWAIT)
        while _first_number(receiver) < new.number:
            receiver.recv(1, socket.MSG_DONTWAIT)  # the descriptors in it are closed


def find(file: SlotFile, memory: int) -> int:
    """A descriptor of this memory; the caller closes it."""
    with file.locked(MAILBOX_LOCK), _socket(file.mailbox_out) as receiver, _peek(receiver) as (message, fds):
        for number, fd in zip(message.memories.values(), fds, strict=True):
            if number == memory:
                return os.dup(fd)
    raise StaleWeights("weights: the memory of their slot is gone")


def _first_number(receiver: socket.socket) -> int:
    return _decode(receiver.recv(_MAX_MESSAGE, socket.MSG_PEEK | socket.MSG_DONTWAIT)).number


@contextmanager
def _peek(receiver: socket.socket) -> Iterator[tuple[DescriptorList, list[int]]]:
    """The message and copies of its descriptors, which are closed at the end of the context."""
    fds = array.array("i")
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, _, _ = receiver.recvmsg(_MAX_MESSAGE, socket.CMSG_LEN(_MAX_MEMORIES * fds.itemsize), flags)
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
    """A socket object for a descriptor, which stays open."""
    end = socket.socket(fileno=fd)
    try:
        yield end
    finally:
        end.detach()
