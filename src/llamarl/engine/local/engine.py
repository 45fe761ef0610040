"""The engine's side: spawns executors through the fork server, moves frames without blocking, notices deaths at once."""

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
from msgspec.structs import replace

from llamarl.config import Config
from llamarl.controller.gpu_numbers import first_gpus
from llamarl.controller.line import Line, role_of
from llamarl.engine.engine import EngineEvent
from llamarl.engine.envelope import decode_envelope, encode
from llamarl.engine.forking import READY
from llamarl.engine.local.fork_server import start_fork_server
from llamarl.engine.local.mps import JobMps, executor_variables
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
_FORK_SERVER_S = 120.0  # for importing torch, however slow the disk
_FORK_S = 20.0  # for a fork, which takes milliseconds: a fork server that takes longer is stopped, or stuck
_MAX_FAILED_STARTS = 3


@dataclass(eq=False, kw_only=True)
class LocalRank(Rank):
    """A rank at the other end of a socket pair."""

    connection: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outgoing: deque[memoryview] = field(default_factory=deque)


class LocalEngine(Supervision[LocalRank]):
    """Runs every executor rank in a process of its own on this machine."""

    def __init__(
        self,
        config: Config,
        line: Line,
        builders: Mapping[str, str],
        slots: Mapping[str, SlotFile],
        log_folder: Path,
        mps: JobMps | None = None,
    ) -> None:
        super().__init__(config)
        self._line, self._builders, self._slots = line, builders, slots
        self._log_folder = log_folder
        self._log_folder.mkdir(parents=True, exist_ok=True)
        self._selector = selectors.DefaultSelector()
        self._to_fork: list[tuple[float, ForkRank, list[int]]] = []  # earliest time, order, descriptors
        self._forking: dict[tuple[str, int, int], float] = {}  # ranks whose fork was ordered, and when
        self._failed_starts = 0  # of the fork server, in a row
        self._first_gpus = first_gpus(line, config.placement)
        self._mps = mps
        self._start_fork_server()

    # The interface of every engine

    def spawn(self, executor: str, incarnation: int, snapshot: Path | None) -> None:
        role = next(role for role in self._line.roles if role.name == role_of(executor))
        not_before_s = time.monotonic() + self._backoff.delay_s(executor)
        rendezvous = os.memfd_create("llamarl-rendezvous", os.MFD_CLOEXEC)
        log = os.open(
            self._log_folder / f"{executor.replace('/', '-')}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )
        for rank in range(role.ranks):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            state = LocalRank(executor, incarnation, rank, started_s=not_before_s, connection=ours)
            self._ranks[executor, rank] = state
            self._selector.register(ours, selectors.EVENT_READ, state)
            order = ForkRank(
                executor=executor,
                incarnation=incarnation,
                rank=rank,
                num_ranks=role.ranks,
                builder=self._builders[role.name],
                config=self._config,
                weights_source=dict(self._line.weights_source),
                first_gpus=self._first_gpus,
                slots=tuple(self._slots),
                snapshot=str(snapshot) if snapshot else "",
                variables={},
                threads=role.threads or os.cpu_count() or 1,
            )
            slot_fds = [fd for file in self._slots.values() for fd in file.fds]
            fds = [theirs.detach(), *map(os.dup, (log, rendezvous, *slot_fds))]
            self._to_fork.append((not_before_s, order, fds))
        os.close(log)
        os.close(rendezvous)
        self._send_fork_orders()

    def send(self, executor: str, message: Message) -> None:
        state = self._ranks.get((executor, 0))
        if state is None or state.hung_up_s is not None:
            return
        self._owe(state)
        state.outgoing.append(memoryview(encode_frame(encode_message(message))))
        self._flush(state)

    def events(self) -> Sequence[EngineEvent]:
        for key, mask in self._selector.select(_WAIT_S):
            if key.data is None:
                self._hear_fork_server()
                continue
            if mask & selectors.EVENT_READ:
                self._read(key.data)
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data)
        self._send_fork_orders()
        self._check_fork_server()
        self._check_deadlines(starting=self._fork_server_ready)
        return self._take_arrivals()

    def stop(self) -> None:
        """Ask, wait a little, then kill. The fork server kills what is left when its control socket closes."""
        with suppress(KeyboardInterrupt, JobFailed):  # after a second Ctrl-C, nobody is asked any more
            self._ask_to_stop()
        self._drop_fork_orders()
        for state in self._ranks.values():
            state.connection.close()
        self._ranks.clear()
        self._control.close()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self._fork_server.wait(_GRACE_S if self._fork_server_ready else 0)
        if self._fork_server.poll() is None:
            self._fork_server.kill()
            self._fork_server.wait()
        self._selector.close()

    def _ask_to_stop(self) -> None:
        for executor, rank in list(self._ranks):
            if rank == 0:
                self.send(executor, Stop())
        deadline = time.monotonic() + _GRACE_S
        while self._fork_server_ready and time.monotonic() < deadline:
            if all(state.hung_up_s is not None for state in self._ranks.values()):
                return
            self.events()

    # The fork server

    def _start_fork_server(self) -> None:
        self._control, self._fork_server = start_fork_server()
        self._control.settimeout(_GRACE_S)
        self._fork_server_ready, self._fork_server_started_s = False, time.monotonic()
        self._selector.register(self._control, selectors.EVENT_READ, None)

    def _send_fork_orders(self) -> None:
        due = [entry for entry in self._to_fork if entry[0] <= time.monotonic()] if self._fork_server_ready else []
        daemon = self._mps.environment() if due and self._mps is not None else {}
        for entry in due:
            self._to_fork.remove(entry)
            _, order, fds = entry
            variables = executor_variables(self._config, self._first_gpus, order.executor, daemon)
            order = replace(order, variables=variables)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            self._forking[order.identity] = time.monotonic()
            with suppress(OSError):  # dead or stuck: `_check_fork_server` will find out
                self._control.sendmsg([encode(order)], [rights])
            _close_all(fds)

    def _drop_fork_orders(self) -> None:
        for _, _, fds in self._to_fork:
            _close_all(fds)
        self._to_fork.clear()

    def _hear_fork_server(self) -> None:
        try:
            data = self._control.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            self._replace_fork_server()
        elif data == READY:
            self._fork_server_ready, self._failed_starts = True, 0
            for state in self._ranks.values():
                state.started_s = max(state.started_s, time.monotonic())
            self._send_fork_orders()
        else:
            with suppress(msgspec.MsgspecError):  # anything else is ignored
                self._hear_of_rank(decode_news(data))

    def _hear_of_rank(self, news: RankForked | RankExited) -> None:
        self._forking.pop(news.identity, None)
        state = self._ranks.get((news.executor, news.rank))
        if state is None or state.incarnation != news.incarnation:
            return
        if isinstance(news, RankForked):
            state.pid = news.pid
            return
        self._drain(state)
        self._hear_of_death(state, news.reason)

    def _replace_fork_server(self, why: str = "died") -> None:
        """Start another one. The old one's children die with it, and the controller spawns what it needs again. Orders to one
        that was never ready wait for the next."""
        self._selector.unregister(self._control)
        self._control.close()
        self._fork_server.kill()
        code = self._fork_server.wait()
        if self._fork_server_ready:
            for state in list(self._ranks.values()):
                self._hang_up(state, f"the process that starts executors {why}")
            self._drop_fork_orders()
        else:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise JobFailed(f"the process that starts executors could not start (exit code {code})")
        self._forking.clear()
        self._start_fork_server()

    def _kill(self, state: LocalRank) -> None:
        """Ask the fork server, its parent, so that no other process with a recycled pid is hit."""
        with suppress(OSError):
            self._control.send(encode(KillFork(*state.identity)))

    # Frames

    def _read(self, state: LocalRank) -> None:
        if state.hung_up_s is not None:
            return  # hung up by the event before this one
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
        """Read its last reports, which may still be in the socket."""
        while state.hung_up_s is None and _readable(state.connection):
            self._read(state)

    def _cut(self, state: LocalRank) -> None:
        self._selector.unregister(state.connection)
        state.connection.close()

    def _fault(self, state: LocalRank, now_s: float) -> str:
        limit_s, since_s = self._config.engine.frame_s, state.reader.incomplete_since_s
        late = since_s is not None and now_s - since_s > limit_s
        return f"sent a frame that took more than {limit_s:g} s" if late else ""

    def _check_fork_server(self) -> None:
        now_s = time.monotonic()
        late = not self._fork_server_ready and now_s - self._fork_server_started_s > _FORK_SERVER_S
        if late or now_s - min(self._forking.values(), default=now_s) > _FORK_S:
            self._replace_fork_server("does not answer")


def _readable(connection: socket.socket) -> bool:
    poll = select.poll()  # select.select cannot take descriptors above 1,023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
