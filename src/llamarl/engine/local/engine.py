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
from llamarl.controller.line import Line, role_of
from llamarl.engine.engine import Arrival, Death
from llamarl.engine.local.frames import BadFrame, FrameReader, encode_frame
from llamarl.engine.local.nursery import READY, start_nursery
from llamarl.engine.local.wire import Birth, Born, Kill, Obituary, decode_envelope, decode_news, encode
from llamarl.errors import JobFailed
from llamarl.messages import Failed, Message, ReaderStuck, Stop, Up
from llamarl.messages import encode as encode_message
from llamarl.weights.slotfile import SlotFile

_READ_BYTES = 1 << 20
_WAIT_S = 0.05
_OBITUARY_S = 0.5  # how long a hang-up waits for the nursery to say why
_GRACE_S = 2.0
_SOON_S = 3.0  # a death so soon after the start makes the next start wait
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 30.0
_NURSERY_S = 120.0  # for importing torch, however slow the disk


@dataclass(eq=False)
class Rank:
    """This end of one executor rank."""

    executor: str
    incarnation: int
    rank: int
    connection: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    outgoing: deque[memoryview] = field(default_factory=deque)
    born_s: float = field(default_factory=time.monotonic)  # or, if later, when there was a nursery to bear it
    up: bool = False
    owes: int = 0  # messages it has not answered
    waiting_since_s: float = 0.0  # when it last spoke, or was given work that found it without any
    hung_up_s: float | None = None
    reason: str = ""
    pid: int = 0

    @property
    def identity(self) -> tuple[str, int, int]:
        return self.executor, self.incarnation, self.rank


class Backoff:
    """Who dies soon after it was started waits before the next start, longer each time; who lived a while does not."""

    def __init__(self) -> None:
        self._started_s: dict[str, float] = {}
        self._delay_s: dict[str, float] = {}

    def delay_s(self, executor: str) -> float:
        """Called at every start; how long to wait with it."""
        now_s, before_s = time.monotonic(), self._started_s.get(executor)
        soon = before_s is not None and now_s - before_s < _SOON_S
        delay_s = min(_MAX_BACKOFF_S, max(_MIN_BACKOFF_S, 2 * self._delay_s.get(executor, 0.0))) if soon else 0.0
        self._delay_s[executor], self._started_s[executor] = delay_s, now_s + delay_s
        return delay_s


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
        self._births: list[tuple[float, Birth, list[int]]] = []  # not before, what, with which descriptors
        self._backoff = Backoff()
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
            state = Rank(executor, incarnation, rank, ours, born_s=not_before_s)
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
        if not state.owes:
            state.waiting_since_s = time.monotonic()
        state.owes += 1
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
        self._check_deadlines()
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

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
        self._control, self._nursery = start_nursery()
        self._control.settimeout(_GRACE_S)
        self._nursery_ready, self._nursery_opened_s = False, time.monotonic()
        self._selector.register(self._control, selectors.EVENT_READ, None)

    def _send_births(self) -> None:
        due = [entry for entry in self._births if entry[0] <= time.monotonic()] if self._nursery_ready else []
        for entry in due:
            self._births.remove(entry)
            _, birth, fds = entry
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            with suppress(OSError):  # gone or stuck: the next `events` or `start_s` will tell
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
            self._nursery_ready = True
            for state in self._ranks.values():
                state.born_s = max(state.born_s, time.monotonic())
            self._send_births()
        else:
            with suppress(msgspec.MsgspecError):  # what is no news is ignored
                self._hear_of_rank(decode_news(data))

    def _hear_of_rank(self, news: Born | Obituary) -> None:
        state = self._ranks.get((news.executor, news.rank))
        if state is None or state.incarnation != news.incarnation:
            return
        if isinstance(news, Born):
            state.pid = news.pid
            return
        self._drain(state)
        if state.reason and len(self._ranks_of(state.executor)) > 1:
            return  # its complaint may only be about the rank that died first: that one is given time to be told of
        self._bury(state, state.reason or news.reason)

    def _replace_nursery(self) -> None:
        """Its children died with it. The controller brings back what it needs, from a new one."""
        self._selector.unregister(self._control)
        self._control.close()
        self._nursery.kill()
        code = self._nursery.wait()
        if not self._nursery_ready:
            raise JobFailed(f"the process that starts executors could not start (exit code {code})")
        for state in list(self._ranks.values()):
            self._hang_up(state, "the process that starts executors died")
        self._drop_births()
        self._open_nursery()

    def _kill(self, state: Rank) -> None:
        """Through the nursery, whose child it is, so that no stranger with a recycled pid is hit."""
        with suppress(OSError):
            self._control.send(encode(Kill(*state.identity)))

    # Frames

    def _read(self, state: Rank) -> None:
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

    def _hear(self, state: Rank, payload: bytes) -> None:
        envelope = decode_envelope(payload)
        state.waiting_since_s = time.monotonic()
        for report in envelope.reports:
            match report:
                case Failed():
                    self._end(state, report.reason)
                    return
                case ReaderStuck():
                    self._kill_reader(report.pid)
                case Up():
                    self._hear_up(state)
                case _ if state.rank == 0:
                    state.owes = max(0, state.owes - 1)
                    self._arrivals.append(Arrival(state.executor, state.incarnation, report))
        if envelope.spans and state.rank == 0:
            self._arrivals.append(Arrival(state.executor, state.incarnation, None, envelope.spans))

    def _hear_up(self, state: Rank) -> None:
        """An executor is up when all its ranks are."""
        was_up, state.up = state.up, True
        if not was_up and all(one.up for one in self._ranks_of(state.executor)):
            self._arrivals.append(Arrival(state.executor, state.incarnation, Up()))

    def _flush(self, state: Rank) -> None:
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

    def _ranks_of(self, executor: str) -> list[Rank]:
        return [state for state in self._ranks.values() if state.executor == executor]

    def _drain(self, state: Rank) -> None:
        """Its last words may still be in the socket."""
        while state.hung_up_s is None and _readable(state.connection):
            self._read(state)

    def _hang_up(self, state: Rank, reason: str = "") -> None:
        """End this connection, not the job. Without a reason of ours, the nursery is given time to say why it ended."""
        if state.hung_up_s is not None:
            return
        state.hung_up_s = time.monotonic()
        state.reason = state.reason or reason
        self._selector.unregister(state.connection)
        state.connection.close()

    def _end(self, state: Rank, reason: str) -> None:
        """Its process must go too, for a reason of ours."""
        self._hang_up(state, reason)
        self._kill(state)

    def _bury(self, state: Rank, reason: str) -> None:
        """The death of any rank is the death of the executor."""
        for one in self._ranks_of(state.executor):
            self._end(one, "")
            del self._ranks[one.executor, one.rank]
        where = f"rank {state.rank}: " if state.rank else ""
        self._arrivals.append(Death(state.executor, state.incarnation, where + reason))

    def _check_deadlines(self) -> None:
        now_s, limits = time.monotonic(), self._config.engine
        if not self._nursery_ready and now_s - self._nursery_opened_s > _NURSERY_S:
            raise JobFailed(f"the process that starts executors did not start within {_NURSERY_S:g} s")
        for state in list(self._ranks.values()):
            if state.hung_up_s is not None:
                if now_s - state.hung_up_s > _OBITUARY_S and self._ranks.get((state.executor, state.rank)) is state:
                    self._bury(state, state.reason or "hung up")
            elif not state.up and self._nursery_ready and now_s - state.born_s > limits.start_s:
                self._end(state, f"did not start within {limits.start_s:g} s")
            elif state.owes and now_s - state.waiting_since_s > limits.silence_s:
                self._end(state, f"silent for {limits.silence_s:g} s with work to do")
            elif _older(state.reader.incomplete_since_s, now_s, limits.frame_s):
                self._end(state, f"sent a frame that took more than {limits.frame_s:g} s")

    def _kill_reader(self, pid: int) -> None:
        for state in list(self._ranks.values()):
            if state.pid == pid != 0:
                self._end(state, f"kept a weight slot for over {self._config.weights.lease_s:g} s")


def _older(since_s: float | None, now_s: float, limit_s: float) -> bool:
    return since_s is not None and now_s - since_s > limit_s


def _readable(connection: socket.socket) -> bool:
    poll = select.poll()  # not select.select, which cannot take the 1,025th descriptor of a process
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
