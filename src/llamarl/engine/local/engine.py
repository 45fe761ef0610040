"""The engine's side: spawns executors through the nursery, moves frames without ever blocking, notices deaths at once."""

from __future__ import annotations

import array
import os
import select
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llamarl.config import Config
from llamarl.controller.line import Line, role_of
from llamarl.engine.engine import Arrival, Death
from llamarl.engine.local.frames import BadFrame, FrameReader, encode_frame
from llamarl.engine.local.wire import Birth, Born, Kill, decode_envelope, decode_news, encode
from llamarl.errors import JobFailed
from llamarl.messages import Failed, Message, ReaderStuck, Stop, Up
from llamarl.messages import encode as encode_message
from llamarl.weights.slots import SlotFile

_READ_BYTES = 1 << 20
_WAIT_S = 0.05
_OBITUARY_S = 0.5  # how long a hang-up waits for the nursery to say why
_GRACE_S = 2.0


@dataclass(eq=False)
class Rank:
    """This end of one executor rank."""

    executor: str
    incarnation: int
    rank: int
    connection: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outgoing: deque[memoryview] = field(default_factory=deque)
    up: bool = False
    waiting_since_s: float = field(default_factory=time.monotonic)  # when it last spoke, or was last given work
    owes: int = 1  # messages it has not answered; being born is the first
    hung_up_s: float | None = None
    reason: str = ""
    pid: int = 0

    @property
    def identity(self) -> tuple[str, int, int]:
        return self.executor, self.incarnation, self.rank


class LocalEngine:
    def __init__(
        self,
        config: Config,
        line: Line,
        builders: Mapping[str, str],
        slots: Mapping[str, SlotFile],
        log_folder: Path,
    ) -> None:
        self._config, self._line, self._builders, self._slots = config, line, builders, slots
        self._log_folder = log_folder
        self._log_folder.mkdir(parents=True, exist_ok=True)
        self._ranks: dict[tuple[str, int], Rank] = {}
        self._selector = selectors.DefaultSelector()
        self._arrivals: list[Arrival | Death] = []
        self._control, self._nursery = _start_nursery()
        self._nursery_ready = False
        self._births: list[tuple[Birth, list[int]]] = []
        self._selector.register(self._control, selectors.EVENT_READ, None)

    # The interface of every engine

    def spawn(self, executor: str, incarnation: int) -> None:
        role = next(role for role in self._line.roles if role.name == role_of(executor))
        meeting = os.memfd_create("llamarl-meeting", os.MFD_CLOEXEC)
        log = os.open(
            self._log_folder / f"{executor.replace('/', '-')}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )
        for rank in range(role.ranks):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            state = Rank(executor, incarnation, rank, ours)
            self._ranks[executor, rank] = state
            self._selector.register(ours, selectors.EVENT_READ, state)
            birth = Birth(
                executor=executor,
                incarnation=incarnation,
                rank=rank,
                num_ranks=role.ranks,
                builder=self._builders[role.name],
                config=self._config,
                weights_source=dict(self._line.weights_source),
                slots=tuple(self._slots),
                threads=role.threads or os.cpu_count() or 1,
            )
            fds = [theirs.detach(), *map(os.dup, (log, meeting, *(file.fd for file in self._slots.values())))]
            self._births.append((birth, fds))
        os.close(log)
        os.close(meeting)
        self._send_births()

    def send(self, executor: str, message: Message) -> None:
        state = self._ranks.get((executor, 0))
        if state is None or state.hung_up_s is not None:
            return
        state.owes += 1
        state.waiting_since_s = time.monotonic()
        state.outgoing.append(memoryview(encode_frame(encode_message(message))))
        self._flush(state)

    def events(self) -> Sequence[Arrival | Death]:
        for key, mask in self._selector.select(_WAIT_S):
            if key.data is None:
                self._hear_nursery()
            else:
                if mask & selectors.EVENT_READ:
                    self._read(key.data)
                if mask & selectors.EVENT_WRITE:
                    self._flush(key.data)
        self._check_deadlines()
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def stop(self) -> None:
        """Ask, wait a little, then kill. The nursery kills what is left when its control socket closes."""
        for executor, rank in list(self._ranks):
            if rank == 0:
                self.send(executor, Stop())
        deadline = time.monotonic() + _GRACE_S
        while any(state.hung_up_s is None for state in self._ranks.values()) and time.monotonic() < deadline:
            if self._control.fileno() < 0:
                break
            self.events()
        for state in self._ranks.values():
            state.connection.close()
        self._ranks.clear()
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._nursery.wait(_GRACE_S)
        if self._nursery.poll() is None:
            self._nursery.kill()
            self._nursery.wait()
        self._selector.close()

    # The nursery

    def _send_births(self) -> None:
        while self._nursery_ready and self._births:
            birth, fds = self._births.pop(0)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            self._control.sendmsg([encode(birth)], [rights])
            for fd in fds:
                os.close(fd)

    def _hear_nursery(self) -> None:
        data = self._control.recv(_READ_BYTES)
        if not data:
            raise JobFailed(f"the process that starts executors is gone ({self._nursery.poll()})")
        if data == b"ready":
            self._nursery_ready = True
            self._send_births()
            return
        news = decode_news(data)
        state = self._ranks.get((news.executor, news.rank))
        if state is None or state.incarnation != news.incarnation:
            return
        if isinstance(news, Born):
            state.pid = news.pid
        else:
            self._drain(state)
            self._bury(state, state.reason or news.reason)

    def _kill(self, state: Rank) -> None:
        """Through the nursery, whose child it is, so that no stranger with a recycled pid is hit."""
        with suppress(BrokenPipeError, OSError):
            self._control.send(encode(Kill(*state.identity)))

    # Frames

    def _read(self, state: Rank) -> None:
        try:
            data = state.connection.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError
            for payload in state.reader.feed(data):
                self._hear(state, payload)
        except BlockingIOError:
            return
        except (ConnectionResetError, BrokenPipeError):
            self._hang_up(state, "")
        except BadFrame as error:
            self._hang_up(state, f"sent {error}")
        except msgspec.MsgspecError as error:
            self._hang_up(state, f"sent something that is no report: {error}")

    def _hear(self, state: Rank, payload: bytes) -> None:
        envelope = decode_envelope(payload)
        state.waiting_since_s = time.monotonic()
        for report in envelope.reports:
            match report:
                case Failed():
                    state.reason = report.reason
                    return
                case ReaderStuck():
                    self._kill_reader(report.pid)
                case Up():
                    state.up, state.owes = True, state.owes - 1
                    if all(one.up for one in self._ranks_of(state.executor)):
                        self._arrivals.append(Arrival(state.executor, state.incarnation, report))
                case _:
                    state.owes -= 1
                    self._arrivals.append(Arrival(state.executor, state.incarnation, report))
        if envelope.spans:
            self._arrivals.append(Arrival(state.executor, state.incarnation, None, envelope.spans))

    def _flush(self, state: Rank) -> None:
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
            self._hang_up(state, "")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if state.outgoing else 0)
        self._selector.modify(state.connection, wanted, state)

    # Deaths

    def _ranks_of(self, executor: str) -> list[Rank]:
        return [state for state in self._ranks.values() if state.executor == executor]

    def _drain(self, state: Rank) -> None:
        """Its last words may still be in the socket."""
        while state.hung_up_s is None and _readable(state.connection):
            self._read(state)

    def _hang_up(self, state: Rank, reason: str) -> None:
        """End this connection, not the job. The process behind it is killed; the nursery will say what became of it."""
        if state.hung_up_s is not None:
            return
        state.hung_up_s = time.monotonic()
        state.reason = state.reason or reason
        self._selector.unregister(state.connection)
        state.connection.close()
        self._kill(state)

    def _bury(self, state: Rank, reason: str) -> None:
        """The death of any rank is the death of the executor."""
        for one in self._ranks_of(state.executor):
            self._hang_up(one, "")
            del self._ranks[one.executor, one.rank]
        where = f"rank {state.rank}: " if state.rank else ""
        self._arrivals.append(Death(state.executor, state.incarnation, where + reason))

    def _check_deadlines(self) -> None:
        now_s, limits = time.monotonic(), self._config.engine
        for state in list(self._ranks.values()):
            if state.hung_up_s is not None:
                if now_s - state.hung_up_s > _OBITUARY_S and self._ranks.get((state.executor, state.rank)) is state:
                    self._bury(state, state.reason or "hung up")
            elif not state.up and now_s - state.waiting_since_s > limits.start_s:
                self._hang_up(state, f"did not start within {limits.start_s:g} s")
            elif state.owes > 0 and now_s - state.waiting_since_s > limits.silence_s:
                self._hang_up(state, f"silent for {limits.silence_s:g} s with work to do")
            elif _older(state.reader.incomplete_since_s, now_s, limits.frame_s):
                self._hang_up(state, f"sent a frame that took more than {limits.frame_s:g} s")

    def _kill_reader(self, pid: int) -> None:
        for state in list(self._ranks.values()):
            if state.pid == pid:
                self._hang_up(state, f"kept a weight slot for over {self._config.weights.lease_s:g} s")


def _older(since_s: float | None, now_s: float, limit_s: float) -> bool:
    return since_s is not None and now_s - since_s > limit_s


def _readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def _start_nursery() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Threads that spin while they wait would take the cores from the other executors; must be set before torch loads.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", "llamarl.engine.local.nursery", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    theirs.close()
    return ours, process
