"""One executor rank in its own process: its end of the socket pair, and how it runs from there."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import torch

from llamarl.builders.context import BuildContext
from llamarl.builders.devices import trainer_devices
from llamarl.builders.registry import load_builder
from llamarl.engine import rank_loop
from llamarl.engine.compiled_code import compiled_code
from llamarl.engine.envelope import Envelope, encode
from llamarl.engine.local.mps import expects_mps, not_joined
from llamarl.engine.local.mps_products import SHARE, wrong_products
from llamarl.engine.local.protocol import ForkRank
from llamarl.engine.malloc import keep_freed_memory
from llamarl.engine.rank_loop import ConnectionClosed
from llamarl.engine.ranks import Ranks
from llamarl.errors import ConfigError
from llamarl.executors.executor import Executor
from llamarl.io.frames import BadFrame, FrameReader, encode_frame
from llamarl.messages import Failed, Message, Noted, decode_message
from llamarl.process_groups import LOOPBACK, let_ranks_share_gpus, store_in
from llamarl.processes import name_process
from llamarl.weights.slot_file import SlotFile

_READ_BYTES = 1 << 20


class SocketConnection:
    """This rank's end of its socket pair."""

    def __init__(self, connection: socket.socket, frame_s: float) -> None:
        self._connection, self._frame_s = connection, frame_s
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._reader = FrameReader()
        self._inbox: deque[Message] = deque()
        self._sending = threading.Lock()  # a thread of its own may publish weights and report that
        self.last_sent_s = 0.0

    def next(self, *, wait: bool) -> Message | None:
        while not self._inbox:
            if not self._poll.poll(self._patience_ms() if wait else 0):
                self._check_deadline()
                if not wait:
                    return None
                continue
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise ConnectionClosed
            self._inbox.extend(_decode(payload) for payload in self._reader.feed(data))
        return self._inbox.popleft()

    def _patience_ms(self) -> float | None:
        """How long to wait: without limit between messages, `frame_s` in the middle of one."""
        return None if self._reader.incomplete_since_s is None else self._frame_s * 1000

    def _check_deadline(self) -> None:
        since_s = self._reader.incomplete_since_s
        if since_s is not None and time.monotonic() - since_s > self._frame_s:
            raise BadFrame(f"a frame that took more than {self._frame_s:g} s")

    def send(self, envelope: Envelope) -> None:
        with self._sending:
            self._connection.sendall(encode_frame(encode(envelope)))
            self.last_sent_s = time.monotonic()


def _decode(payload: bytes) -> Message:
    try:
        message: Message = decode_message(payload)
    except msgspec.MsgspecError as error:
        raise BadFrame(f"something that is no message: {error}") from None
    return message


def run_child(order: ForkRank, fds: list[int]) -> None:
    socket_fd, log_fd, rendezvous_fd, *slot_fds = fds
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    connection = SocketConnection(socket.socket(fileno=socket_fd), order.config.engine.frame_s)
    try:
        name_process(order.executor if order.num_ranks == 1 else f"{order.executor}.{order.rank}")
        keep_freed_memory()
        torch.set_num_threads(order.threads)
        os.environ.update(order.variables)  # before CUDA starts
        if order.config.engine.share_gpus:
            let_ranks_share_gpus()
        ranks = Ranks.join(order.rank, order.num_ranks, lambda: store_in(rendezvous_fd, order.num_ranks), LOOPBACK)
        with compiled_code(keep=order.config.engine.keep_compiled):
            rank_loop.run_rank(
                lambda: _build(order, SlotFile.by_role(order.slots, slot_fds), connection), connection, ranks
            )
    except (ConnectionClosed, BrokenPipeError, ConnectionResetError):
        pass  # the engine ended, or does not want this executor any more
    except BadFrame as error:
        rank_loop.tell(connection, Failed(f"the engine sent {error}"))
    except (Exception, SystemExit) as error:  # the border to the executor's code
        rank_loop.tell_failure(connection, error)


def _build(order: ForkRank, slots: dict[str, SlotFile], connection: SocketConnection) -> Executor:
    context = BuildContext(
        order.config,
        order.executor,
        slots,
        order.weights_source,
        Path(order.snapshot) if order.snapshot else None,
        order.rank,
        order.num_ranks,
        tell_engine=lambda report: rank_loop.tell(connection, report),
        first_gpus=order.first_gpus,
    )
    if SHARE in order.variables:
        device = trainer_devices(order.config, order.first_gpus)[order.rank]
        if wrong := wrong_products(order.config, device):
            raise ConfigError(wrong)
    executor = load_builder(order.builder)(context)
    if expects_mps(order.config, order.first_gpus, order.variables) and (wrong := not_joined()):
        if order.config.engine.mps == "on":
            raise RuntimeError(wrong)
        rank_loop.tell(connection, Noted(f"{wrong}; its kernels take turns with those of others"))
    return executor
