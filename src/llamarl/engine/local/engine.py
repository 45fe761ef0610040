"""The engine's side: spawns executors through the nursery, moves frames without ever blocking, notices deaths at once."""

from __future__ import annotations

import array
import os
import select
import selectors
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llamarl.config import Config
from llamarl.controller.gpu_numbers import first_gpus
from llamarl.controller.line import Line, role_of
from llamarl.engine.engine import Arrival, Death
from llamarl.engine.envelope import decode_envelope, encode
from llamarl.engine.forking import READY
from llamarl.engine.local.fork_server import start_fork_server
from llamarl.engine.local.protocol import ForkRank, KillFork, RankExited, RankForked, decode_news
from llamarl.engine.supervision import Rank, Supervision
from llamarl.errors import JobFailed
from llamarl.io.frames import BadFrame, FrameReader, encode_frame
from llamarl.messages import Message, Stop
from llamarl.messages import encode as encode_message
from llamarl.weights.slot_file import SlotFile

_READ_BYTES = 1 << 20
_WAIT_S = 0.05
_GRACE_S = 2.0
_NURSERY_S = 120.0  # for importing torch, however slow the disk
_BIRTH_S = 20.0  # for a fork, which takes milliseconds: who takes longer is stopped, or stuck
_MAX_FAILED_STARTS = 3


@dataclass(eq=False, kw_only=True)
class LocalRank(Rank):
    """Spoken to over a socket pair."""

    connection: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outgoing: deque[memoryview] = field(default_factory=deque)


class LocalEngine(Supervision[LocalRank]):
    def __init__(
        self,
        config: Config,
        line: Line,
        builders: Mapping[str, str],
        slots: Mapping[str, SlotFile],
        log_folder: Path,
    ) -> None:
        super().__init__(config)
        self._line, self._builders, self._slots = line, builders, slots
        self._log_folder = log_folder
        self._log_folder.mkdir(parents=True, exist_ok=True)
        self._selector = selectors.DefaultSelector()
        self._births: list[tuple[float, ForkRank, list[int]]] = []  # not before, what, with which descriptors
        self._unborn: dict[tuple[str, int, int], float] = {}  # births that were ordered, and when
        self._failed_starts = 0  # of the nursery, in a row
        self._open_nursery()

    # The interface of every engine

    def spawn(self, executor: str, incarnation: int, snapshot: Path | None) -> None:
        role = next(role for role in self._line.roles if role.name == role_of(executor))
        not_before_s = time.monotonic() + self._backoff.delay_s(executor)
        meeting = os.memfd_create("llamarl-meeting", os.MFD_CLOEXEC)
        log = os.open(
            self._log_folder / f"{executor.replace('/', '-')}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )
        for rank in range(role.ranks):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            state = LocalRank(executor, incarnation, rank, born_s=not_before_s, connection=ours)
            self._ranks[executor, rank] = state
            self._selector.register(ours, selectors.EVENT_READ, state)
            birth = ForkRank(
                executor=executor,
                incarnation=incarnation,
                rank=rank,
                num_ranks=role.ranks,
                builder=self._builders[role.name],
                config=self._config,
                weights_source=dict(self._line.weights_source),
                first_gpus=first_gpus(self._line, self._config.placement),
                slots=tuple(self._slots),
                snapshot=str(snapshot) if snapshot else "",
                threads=role.threads or os.cpu_count() or 1,
            )
            slot_fds = [fd for file in self._slots.values() for fd in file.fds]
            fds = [theirs.detach(), *map(os.dup, (log, meeting, *slot_fds))]
            self._births.append((not_before_s, birth, fds))
        os.close(log)
        os.close(meeting)
        self._send_births()

    def send(self, executor: str, message: Message) -> None:
        state = self._ranks.get((executor, 0))
        if state is None or state.hung_up_s is not None:
            return
        self._owe(state)
        state.outgoing.append(memoryview(encode_frame(encode_message(message))))
        self._flush(state)

    def events(self) -> Sequence[Arrival | Death]:
        for key, mask in self._selector.select(_WAIT_S):
            if key.data is None:
                self._hear_nursery()
                continue
            if mask & selectors.EVENT_READ:
                self._read(key.data)
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data)
        self._send_births()
        self._check_nursery()
        self._check_deadlines(starting=self._nursery_ready)
        return self._take_arrivals()

    def stop(self) -> None:
        """Ask, wait a little, then kill. The nursery kills what is left when its control socket closes."""
        with suppress(KeyboardInterrupt, JobFailed):  # a second Ctrl-C: no more asking
            self._ask_to_stop()
        self._drop_births()
        for state in self._ranks.values():
            state.connection.close()
        self._ranks.clear()
        self._control.close()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self._nursery.wait(_GRACE_S if self._nursery_ready else 0)
        if self._nursery.poll() is None:
            self._nursery.kill()
            self._nursery.wait()
        self._selector.close()

    def _ask_to_stop(self) -> None:
        for executor, rank in list(self._ranks):
            if rank == 0:
                self.send(executor, Stop())
        deadline = time.monotonic() + _GRACE_S
        while self._nursery_ready and time.monotonic() < deadline:
            if all(state.hung_up_s is not None for state in self._ranks.values()):
                return
            self.events()

    # The nursery

    def _open_nursery(self) -> None:
        self._control, self._nursery = start_fork_server()
        self._control.settimeout(_GRACE_S)
        self._nursery_ready, self._nursery_opened_s = False, time.monotonic()
        self._selector.register(self._control, selectors.EVENT_READ, None)

    def _send_births(self) -> None:
        due = [entry for entry in self._births if entry[0] <= time.monotonic()] if self._nursery_ready else []
        for entry in due:
            self._births.remove(entry)
            _, birth, fds = entry
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            self._unborn[birth.identity] = time.monotonic()
            with suppress(OSError):  # gone or stuck: `_check_nursery` will tell
                self._control.sendmsg([encode(birth)], [rights])
            _close_all(fds)

    def _drop_births(self) -> None:
        for _, _, fds in self._births:
            _close_all(fds)
        self._births.clear()

    def _hear_nursery(self) -> None:
        try:
            data = self._control.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            self._replace_nursery()
        elif data == READY:
            self._nursery_ready, self._failed_starts = True, 0
            for state in self._ranks.values():
                state.born_s = max(state.born_s, time.monotonic())
            self._send_births()
        else:
            with suppress(msgspec.MsgspecError):  # what is no news is ignored
                self._hear_of_rank(decode_news(data))

    def _hear_of_rank(self, news: RankForked | RankExited) -> None:
        self._unborn.pop(news.identity, None)
        state = self._ranks.get((news.executor, news.rank))
        if state is None or state.incarnation != news.incarnation:
            return
        if isinstance(news, RankForked):
            state.pid = news.pid
            return
        self._drain(state)
        self._hear_of_death(state, news.reason)

    def _replace_nursery(self, why: str = "died") -> None:
        """Its children die with it, and the controller brings back what it needs, from a new one. What waits for one that
        was never ready waits for the next."""
        self._selector.unregister(self._control)
        self._control.close()
        self._nursery.kill()
        code = self._nursery.wait()
        if self._nursery_ready:
            for state in list(self._ranks.values()):
                self._hang_up(state, f"the process that starts executors {why}")
            self._drop_births()
        else:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise JobFailed(f"the process that starts executors could not start (exit code {code})")
        self._unborn.clear()
        self._open_nursery()

    def _kill(self, state: LocalRank) -> None:
        """Through the nursery, whose child it is, so that no stranger with a recycled pid is hit."""
        with suppress(OSError):
            self._control.send(encode(KillFork(*state.identity)))

    # Frames

    def _read(self, state: LocalRank) -> None:
        if state.hung_up_s is not None:
            return  # by the event before this one
        try:
            data = state.connection.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError
            for payload in state.reader.feed(data):
                self._hear(state, payload)
        except BlockingIOError:
            return
        except (ConnectionResetError, BrokenPipeError):
            self._hang_up(state)
        except BadFrame as error:
            self._end(state, f"sent {error}")
        except msgspec.MsgspecError as error:
            self._end(state, f"sent something that is no report: {error}")

    def _hear(self, state: LocalRank, payload: bytes) -> None:
        self._hear_envelope(state, decode_envelope(payload))

    def _flush(self, state: LocalRank) -> None:
        if state.hung_up_s is not None:
            return
        try:
            while state.outgoing:
                sent = state.connection.send(state.outgoing[0])
                if sent < len(state.outgoing[0]):
                    state.outgoing[0] = state.outgoing[0][sent:]
                else:
                    state.outgoing.popleft()
        except BlockingIOError:
            pass
        except (ConnectionResetError, BrokenPipeError):
            self._drain(state)
            self._hang_up(state)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if state.outgoing else 0)
        self._selector.modify(state.connection, wanted, state)

    # Deaths

    def _drain(self, state: LocalRank) -> None:
        """Its last words may still be in the socket."""
        while state.hung_up_s is None and _readable(state.connection):
            self._read(state)

    def _cut(self, state: LocalRank) -> None:
        self._selector.unregister(state.connection)
        state.connection.close()

    def _fault(self, state: LocalRank, now_s: float) -> str:
        limit_s, since_s = self._config.engine.frame_s, state.reader.incomplete_since_s
        late = since_s is not None and now_s - since_s > limit_s
        return f"sent a frame that took more than {limit_s:g} s" if late else ""

    def _check_nursery(self) -> None:
        now_s = time.monotonic()
        late = not self._nursery_ready and now_s - self._nursery_opened_s > _NURSERY_S
        if late or now_s - min(self._unborn.values(), default=now_s) > _BIRTH_S:
            self._replace_nursery("does not answer")


def _readable(connection: socket.socket) -> bool:
    poll = select.poll()  # not select.select, which cannot take the 1,025th descriptor of a process
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
