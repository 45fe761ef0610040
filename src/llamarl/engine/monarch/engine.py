"""The engine's side: places executors on hosts, talks to their ranks over Monarch, notices deaths and lost hosts."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from llamarl import __version__
from llamarl.config import Config, HostConfig
from llamarl.controller.gpu_numbers import first_gpus
from llamarl.controller.line import Line, Role, index_of, role_of
from llamarl.engine.engine import Arrival, Death, EngineEvent, ExecutorJoined, ExecutorLeft
from llamarl.engine.envelope import Envelope
from llamarl.engine.monarch import client
from llamarl.engine.monarch.addresses import url_of
from llamarl.engine.monarch.bootstrap import forked_command
from llamarl.engine.monarch.client import Client, FromRank, MeshFault, Pulse
from llamarl.engine.monarch.deferred_loads import DeferredLoads
from llamarl.engine.monarch.hosts import Host, OwnWorker, RemoteWorker
from llamarl.engine.monarch.joined_hosts import JoinedHosts
from llamarl.engine.monarch.placement import place
from llamarl.engine.monarch.protocol import (
    RankReport,
    RankSpec,
    RankStarted,
    RankStopped,
    RendezvousCall,
    StoreRequest,
    encode,
)
from llamarl.engine.monarch.rank import RankActor
from llamarl.engine.monarch.rendezvous import RendezvousStores
from llamarl.engine.supervision import Rank, Supervision
from llamarl.errors import JobFailed
from llamarl.messages import LoadWeights, Message, Noted, Stop
from llamarl.messages import encode as encode_message
from llamarl.process_groups import LOOPBACK, interface_for
from llamarl.weights.slot_file import SlotFile

_WAIT_S = 0.05
_GRACE_S = 2.0
_FORGET_S = 60.0
_BEATS = 10  # heartbeats in the time after which a silent host is taken for lost
_AGENT_SHARE = 0.75  # of that time, after which a host that gets no heartbeat ends all that it runs


@dataclass(eq=False, kw_only=True)
class MonarchRank(Rank):
    """A rank that is reached through an actor."""

    actor: Any
    mesh: str  # name of its actor's mesh
    place: int  # in that mesh
    host: Host
    name: str  # by which its process can be killed
    processes: Any  # Monarch's process mesh
    ended: bool = False  # whether it stopped as asked
    outgoing: list[bytes] = field(default_factory=list)  # messages that Monarch does not have yet
    sent: int = 0  # number of parcels sent
    heard: int = 0  # number of messages received


@dataclass(frozen=True)
class PendingSpawn:
    """An executor that waits for its start: for its time, or for room."""

    executor: str
    incarnation: int
    snapshot: Path | None
    not_before_s: float
    since_s: float = field(default_factory=time.monotonic)


class MonarchEngine(Supervision[MonarchRank]):
    """Runs every executor rank in an actor of Monarch, on this machine or on named hosts."""

    exit_report_s = 2.0  # longer, since it comes over the network

    def __init__(
        self,
        config: Config,
        line: Line,
        builders: Mapping[str, str],
        slots: Mapping[str, SlotFile],
        log_folder: Path,
    ) -> None:
        super().__init__(config)
        self._line, self._builders, self._log_folder = line, builders, log_folder
        self._log_folder.mkdir(parents=True, exist_ok=True)
        self._job = f"{secrets.token_hex(4)}:"
        self._client = Client(config.engine, self._answer)
        self._hosts = _hosts(config, slots, log_folder)  # those that the settings name
        self._guest_role = line.sampling_role  # whose executors may join
        self._joined = JoinedHosts(config, self._guest_role, self._make_guest, self._on_host_left)
        self._waits_for_guests = False
        self._network = interface_for(config.engine.host_names, config.engine.trusted_network)
        self._pending: list[PendingSpawn] = []
        self._stores, self._deferred_loads = RendezvousStores(), DeferredLoads(line.weights_source)
        self._opened_s = time.monotonic()
        self._numbers = count()
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._heart.start()

    # The interface of every engine

    def spawn(self, executor: str, incarnation: int, snapshot: Path | None) -> None:
        if self._is_guest(executor) and self._joined.host_of(executor) is None:
            return  # its host has left meanwhile, which is told next
        not_before_s = time.monotonic() + self._backoff.delay_s(executor)
        self._pending.append(PendingSpawn(executor, incarnation, snapshot, not_before_s))
        self._place_executors()

    def send(self, executor: str, message: Message) -> None:
        state = self._ranks.get((executor, 0))
        if state is None or state.hung_up_s is not None:
            return
        if isinstance(message, LoadWeights) and self._crosses_hosts and self._deferred_loads.defer(executor, message):
            return
        self._owe(state)
        state.outgoing.append(encode_message(message))

    def events(self) -> Sequence[EngineEvent]:
        """Messages since the last call go out first, in one parcel for each rank. A parcel costs the same at any size,
        and a generator that gets its groups one by one would begin with the first few."""
        self._deliver()
        wait_s = _WAIT_S
        while (heard := self._client.next(wait_s)) is not None:
            wait_s = 0.0
            match heard:
                case FromRank():
                    self._hear(heard)
                case Pulse():
                    self._hear_pulse(heard)
                case client.ProcessDeath():
                    self._hear_of_deaths([one for one in self._ranks.values() if one.name == heard.name], heard.reason)
                    for host in self._all_hosts:
                        if host.up and host.name == heard.name:
                            self._lose_host(host, heard.reason)
                case MeshFault():
                    self._hear_of_deaths(self._members(heard), heard.reason)
        self._joined.advance()
        self._watch_hosts()
        self._place_executors()
        self._check_deadlines()
        return self._settle(self._take_arrivals())

    def stop(self) -> None:
        """Ask, wait a little, then end the job on all hosts, and a worker of our own."""
        if self._stopped.is_set():
            return
        with suppress(KeyboardInterrupt, JobFailed):  # after a second Ctrl-C, nobody is asked any more
            self._ask_to_stop()
        self._stopped.set()
        for host in self._all_hosts:
            host.close()
        self._joined.close()
        self._ranks.clear()
        self._client.close()

    def _ask_to_stop(self) -> None:
        for executor, rank in list(self._ranks):
            if rank == 0:
                self.send(executor, Stop())
        deadline_s = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline_s:
            if all(state.ended or state.hung_up_s is not None for state in self._ranks.values() if state.up):
                return
            self.events()

    def dismiss(self, executor: str, reason: str) -> None:
        host = self._joined.host_of(executor)
        self._remove_guest(executor)
        self._joined.dismiss(executor, reason)
        if host is not None:
            self._arrivals.append(ExecutorLeft(executor, host.name, f"sent away: {reason}"))

    # Hosts

    @property
    def _all_hosts(self) -> list[Host]:
        return [*self._hosts, *self._joined.hosts]

    @property
    def _crosses_hosts(self) -> bool:
        return bool(self._config.engine.hosts)

    def _beat(self) -> None:
        """Send heartbeats, in a thread of its own, so that no host takes a busy driver for a dead one."""
        every_s = self._config.engine.host_s / _BEATS
        while not self._stopped.wait(every_s):
            for host in self._all_hosts:
                host.beat()

    def _watch_hosts(self) -> None:
        limit_s = self._config.engine.host_s
        for host in self._all_hosts:
            if host.up and time.monotonic() - host.heard_s > limit_s:
                self._lose_host(host, f"host {host.name} was silent for {limit_s:g} s")
                continue
            host.try_to_reach(self._client.port, self._job, _AGENT_SHARE * limit_s)

    def _lose_host(self, host: Host, reason: str) -> None:
        if self._joined.owns(host):
            self._joined.leave(host, reason)
            return
        host.up = False
        for state in [one for one in self._ranks.values() if one.host is host]:
            if self._ranks.get((state.executor, state.rank)) is state:
                self._declare_dead(state, reason)
        host.lose()

    def _hear_pulse(self, pulse: Pulse) -> None:
        host = next((one for one in self._all_hosts if one.name == pulse.host), None)
        if host is None or not host.expects(pulse.attempt):
            return
        if pulse.version != __version__:
            raise JobFailed(f"host {host.name} has llamarl {pulse.version}, this one {__version__}; install the same")
        host.on_pulse(pulse.clock_s)
        for executor in self._joined.welcome(host):
            self._waits_for_guests = False
            self._arrivals.append(ExecutorJoined(executor, host.name))

    # Hosts that join

    def _make_guest(self, number: int, address: str) -> Host:
        link = RemoteWorker(url_of("--listen", address, self._config.engine.certs))
        return Host(number, address, link, HostConfig(address=address), self._log_folder / "hosts.log")

    def _is_guest(self, executor: str) -> bool:
        role = self._guest_role
        return role_of(executor) == role.name and index_of(executor) >= role.executors

    def _on_host_left(self, host: Host, executors: Sequence[str], reason: str) -> None:
        host.up = False
        for executor in executors:
            self._remove_guest(executor)
            self._arrivals.append(ExecutorLeft(executor, host.name, reason))
        host.close()
        host.lose()

    def _remove_guest(self, executor: str) -> None:
        self._pending = [one for one in self._pending if one.executor != executor]
        if self._ranks_of(executor):
            self._remove(executor)

    # Spawning

    def _place_executors(self) -> None:
        now_s = time.monotonic()
        if not all(host.seen for host in self._hosts) and now_s - self._opened_s < self._config.engine.host_s:
            return  # all hosts are waited for, so that executors are spread over all from the beginning
        for pending in [one for one in self._pending if one.not_before_s <= now_s]:
            role = next(role for role in self._line.roles if role.name == role_of(pending.executor))
            if self._is_guest(pending.executor):
                self._place_guest(pending, role)
                continue
            rooms = [host.room(role.name) for host in self._hosts]
            placed = place(rooms, role.ranks, may_span=True)
            if placed:
                self._pending.remove(pending)
                self._spawn_ranks(pending, role, [(self._hosts[number], ranks) for number, ranks in placed])
            elif now_s - pending.since_s > self._config.engine.start_s and not self._lives(role):
                self._give_up(pending, role)

    def _place_guest(self, pending: PendingSpawn, role: Role) -> None:
        host = self._joined.host_of(pending.executor)
        if host is not None and host.up:
            self._pending.remove(pending)
            self._spawn_ranks(pending, role, [(host, role.ranks)])

    def _give_up(self, pending: PendingSpawn, role: Role) -> None:
        """Nobody of this role is left. Where hosts may join that bring one, they are waited for."""
        why = self._why_no_room(role)
        if not self._config.engine.join or role.name != self._guest_role.name:
            raise JobFailed(f"{pending.executor}: {why}")
        if not self._waits_for_guests:
            self._waits_for_guests = True
            told = Noted(f"{why}; waiting for a host to join at {self._config.engine.join}")
            self._arrivals.append(Arrival(pending.executor, pending.incarnation, told))

    def _lives(self, role: Role) -> bool:
        return any(role_of(executor) == role.name for executor, _ in self._ranks)

    def _why_no_room(self, role: Role) -> str:
        lost = [host.name for host in self._hosts if not host.up]
        out = f"; not reached: {', '.join(lost)}" if lost else ""
        return f"no host had room for {role.ranks} ranks within {self._config.engine.start_s:g} s{out}"

    def _spawn_ranks(self, pending: PendingSpawn, role: Role, places: Sequence[tuple[Host, int]]) -> None:
        first = 0
        for host, num_ranks in places:
            ranks = range(first, first + num_ranks)
            gpus = tuple(host.take(pending.executor, rank, gpu=role.gpu) for rank in ranks)
            interface = LOOPBACK if len(places) == 1 else self._network
            self._spawn_on(host, ranks, self._spec_of(pending, role, first, gpus, interface))
            first += num_ranks

    def _spec_of(
        self, pending: PendingSpawn, role: Role, first: int, gpus: tuple[int | None, ...], interface: str
    ) -> RankSpec:
        source = self._line.weights_source.get(role.name, role.name)
        writers = {one.name: one.ranks for one in self._line.roles if one.name in self._line.publishers}
        return RankSpec(
            executor=pending.executor,
            incarnation=pending.incarnation,
            first_rank=first,
            num_ranks=role.ranks,
            builder=self._builders[role.name],
            config=self._config,
            weights_source=dict(self._line.weights_source),
            first_gpus=first_gpus(self._line, self._config.placement),
            threads=role.threads or os.cpu_count() or 1,
            snapshot=str(pending.snapshot.resolve()) if pending.snapshot else "",
            log=str((self._log_folder / f"{pending.executor.replace('/', '-')}.log").resolve()),
            interface=interface,
            gpus=gpus,
            network=self._network,
            num_writers=writers.get(source, 0) if self._crosses_hosts else 0,
        )

    def _spawn_on(self, host: Host, ranks: range, spec: RankSpec) -> None:
        mesh = f"{spec.executor.replace('/', '_')}_{spec.incarnation}_{next(self._numbers)}"
        names = [f"{self._job}{spec.executor}.{spec.incarnation}.{rank}." for rank in ranks]
        procs = host.mesh.spawn_procs(
            per_host={"ranks": len(ranks)},
            name=f"p{mesh}",
            bootstrap_command=lambda point: forked_command(names[point["ranks"]]),
        )
        actors = procs.spawn(mesh, RankActor, self._client.port, encode(spec))
        for index, rank in enumerate(ranks):
            self._ranks[spec.executor, rank] = MonarchRank(
                spec.executor,
                spec.incarnation,
                rank,
                actor=actors.slice(ranks=index),
                mesh=mesh,
                place=index,
                host=host,
                name=names[index],
                processes=procs,
            )

    # What ranks send

    def _hear(self, received: FromRank) -> None:
        state = self._ranks.get((received.executor, received.rank))
        if state is None or state.incarnation != received.incarnation or state.hung_up_s is not None:
            return
        if received.number != state.heard:
            self._end(state, f"word {state.heard} of it was lost")
            return
        state.heard += 1
        match received.message:
            case RankStarted(pid=pid):
                state.pid = pid
            case RankReport(envelope=envelope):
                self._hear_envelope(state, _at_our_time(envelope, state.host.ahead_s))
            case RankStopped():
                state.ended = True
            case StoreRequest():
                pass  # already answered, by the listening thread
            case RendezvousCall(rendezvous=rendezvous, num_readers=num_readers):
                self._tell_writers(state, "serve_readers", rendezvous, num_readers)
            case _:
                self._end(state, "sent something that is no report")

    def _hear_of_deaths(self, dead: list[MonarchRank], reason: str) -> None:
        for state in dead:
            if self._ranks.get((state.executor, state.rank)) is state:
                self._hear_of_death(state, reason)

    def _members(self, fault: MeshFault) -> list[MonarchRank]:
        of_mesh = [state for state in self._ranks.values() if state.mesh == fault.mesh]
        return [state for state in of_mesh if not fault.ranks or state.place in fault.ranks]

    def _settle(self, arrivals: list[EngineEvent]) -> list[EngineEvent]:
        """Send the load orders that these arrivals make possible."""
        for arrival in arrivals if self._crosses_hosts else ():
            if isinstance(arrival, Death | ExecutorLeft):
                self._deferred_loads.on_death(arrival.executor)
            if not isinstance(arrival, Arrival):
                continue
            for reader, message in self._deferred_loads.on_report(arrival.executor, arrival.report).items():
                self.send(reader, message)
        return arrivals

    # What ranks are sent

    def _deliver(self) -> None:
        for state in [one for one in self._ranks.values() if one.outgoing]:
            with suppress(Exception):  # the border to Monarch: it may know of a death before we do
                state.actor.deliver.broadcast(state.sent, state.outgoing)
                state.sent += 1
            state.outgoing = []

    def _answer(self, received: FromRank, request: StoreRequest) -> None:
        """Called by the listening thread, so that a rendezvous succeeds also while the driver is busy."""

        def reply(number: int, value: bytes) -> None:
            state = self._ranks.get((received.executor, received.rank))
            if state is not None and state.incarnation == received.incarnation:
                with suppress(Exception):
                    state.actor.answer.broadcast(number, value)

        self._stores.handle(request, reply)

    def _tell_writers(self, reader: MonarchRank, endpoint: str, *args: object) -> None:
        source = self._line.weights_source.get(role_of(reader.executor))
        for state in list(self._ranks.values()):
            if role_of(state.executor) == source:
                with suppress(Exception):
                    getattr(state.actor, endpoint).broadcast(*args)

    # Deaths

    def _cut(self, state: MonarchRank) -> None:
        """Nothing to close: messages from the rank are ignored from now on."""

    def _kill(self, state: MonarchRank) -> None:
        state.host.kill(state.name)

    def _remove(self, executor: str) -> None:
        state = self._ranks_of(executor)[0]
        rendezvous = f"{executor}.{state.incarnation}"
        if role_of(executor) in self._line.weights_source:
            self._tell_writers(state, "on_reader_gone", rendezvous)
        self._stores.end(rendezvous)
        for one in self._ranks_of(executor):
            one.host.taken.pop((one.executor, one.rank), None)
            if not one.place and one.host.up:
                threading.Thread(target=_forget, args=(one.processes,), daemon=True).start()
        super()._remove(executor)


def _hosts(config: Config, slots: Mapping[str, SlotFile], logs: Path) -> list[Host]:
    settings, log = config.engine, logs / "hosts.log"
    if not settings.hosts:
        return [Host(0, "this machine", OwnWorker(slots, logs / "worker.log"), HostConfig(address=""), log)]
    return [
        Host(number, host.address, RemoteWorker(url_of("engine.hosts", host.address, settings.certs)), host, log)
        for number, host in enumerate(settings.all_hosts)
    ]


def _forget(processes: Any) -> None:
    """Tell Monarch to stop supervising these processes."""
    with suppress(Exception):
        processes.stop().get(timeout=_FORGET_S)


def _at_our_time(envelope: Envelope, ahead_s: float) -> Envelope:
    """The envelope, with its spans on this machine's clock."""
    if not ahead_s or not envelope.spans:
        return envelope
    spans = (replace(span, start_s=span.start_s - ahead_s, end_s=span.end_s - ahead_s) for span in envelope.spans)
    return replace(envelope, spans=tuple(spans))
