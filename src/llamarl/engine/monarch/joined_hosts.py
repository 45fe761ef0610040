"""The hosts that have joined a running job, or want to: who is let in, under which names, and who has left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamarl import __version__
from llamarl.config import Config
from llamarl.controller.line import Role
from llamarl.engine.monarch.addresses import split_address, url_of
from llamarl.engine.monarch.join_listener import JoinListener, JoinPeer
from llamarl.engine.monarch.join_protocol import (
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    LeaveGranted,
    LeaveRequest,
)
from llamarl.errors import InputError

if TYPE_CHECKING:
    from llamarl.engine.monarch.hosts import Host

_REACH_S = 60.0  # longest time from a worker's offer until its host is reached
_FIRST_NUMBER = 1 << 16  # above those of the hosts that the settings name


@dataclass(eq=False)
class JoinedHost:
    """A host that has offered itself. It is kept after it has left, so that its executors get their names again."""

    host: Host
    names: list[str] = field(default_factory=list)  # of executors that ever lived there
    executors: list[str] = field(default_factory=list)  # of those, the ones that live there now
    replicas: int = 0
    worker: str = ""  # which start of its worker made the offer
    peer: JoinPeer | None = None
    offered_s: float = 0.0

    @property
    def welcomed(self) -> bool:
        return bool(self.executors)


class JoinedHosts:
    """Keeps these hosts. `make_host(number, address)` stands for one that offers itself for the first time;
    `on_left(host, executors, reason)` is called when one is gone."""

    def __init__(
        self,
        config: Config,
        role: Role,
        make_host: Callable[[int, str], Host],
        on_left: Callable[[Host, list[str], str], None],
    ) -> None:
        self._config, self._role, self._make_host, self._on_left = config, role, make_host, on_left
        self._listener = JoinListener(config.engine.join, config.engine.certs) if config.engine.join else None
        self._named = frozenset(host.address for host in config.engine.all_hosts)
        self._known: dict[str, JoinedHost] = {}  # by address
        self._present: dict[str, JoinedHost] = {}
        self._next_index = role.executors

    @property
    def hosts(self) -> list[Host]:
        """The hosts that should be reached; safe to be read by another thread."""
        return [one.host for one in list(self._present.values())]

    def owns(self, host: Host) -> bool:
        return any(one.host is host for one in self._present.values())

    def host_of(self, executor: str) -> Host | None:
        return next((one.host for one in self._present.values() if executor in one.executors), None)

    # What workers ask

    def advance(self) -> None:
        """Hear what workers ask."""
        for peer, message in self._listener.heard() if self._listener else ():
            offered = next((one for one in self._present.values() if one.peer is peer), None)
            match message:
                case JoinRequest():
                    self._on_offer(peer, message)
                case LeaveRequest():
                    peer.send(LeaveGranted())
                    peer.close()
                    if offered is not None:
                        self.leave(offered.host, "announced")
                case None if offered is not None:
                    offered.peer = None  # heartbeats alone decide whether the host lives
        for one in list(self._present.values()):
            self._check_offer(one)

    def _on_offer(self, peer: JoinPeer, offer: JoinRequest) -> None:
        if reason := self._refusal(peer, offer):
            peer.send(JoinRefused(reason))
            peer.close()
            return
        present = self._present.get(offer.address)
        if present is not None and present.worker == offer.worker:
            present.peer = peer
            if present.welcomed:
                peer.send(JoinAccepted(tuple(present.executors)))
            return
        if present is not None:
            self.leave(present.host, "its worker was started again")
        one = self._known.get(offer.address) or JoinedHost(
            self._make_host(_FIRST_NUMBER + len(self._known), offer.address)
        )
        one.worker, one.peer, one.offered_s = offer.worker, peer, time.monotonic()
        one.replicas = self._num_replicas(offer)
        self._known[offer.address] = self._present[offer.address] = one

    def _refusal(self, peer: JoinPeer, offer: JoinRequest) -> str:
        """Why this host cannot help; empty: it can."""
        if offer.version != __version__:
            return f"it has llamarl {offer.version}, the job {__version__}; install the same"
        try:
            host, _ = split_address("--listen", offer.address)
            url_of("--listen", offer.address, self._config.engine.certs)
        except InputError as error:
            return str(error)
        if peer.names is not None and host not in peer.names:
            return f"its certificate is for {', '.join(sorted(peer.names))}, and it listens at {offer.address}"
        if offer.address in self._named:
            return f"{offer.address} is among engine.hosts; start that worker without --join"
        if not self._num_replicas(offer):
            return f"it has {offer.gpus} GPUs, and a generator takes {self._role.ranks} (generator.tensor)"
        return ""

    def _num_replicas(self, offer: JoinRequest) -> int:
        device = self._config.generator.device
        if offer.replicas or device == "cpu" or (device == "auto" and not offer.gpus):
            return offer.replicas or 1
        shared = self._config.engine.share_gpus and offer.gpus > 0
        return max(int(shared), offer.gpus // self._role.ranks)

    def _check_offer(self, one: JoinedHost) -> None:
        """Forget a host that was never reached: its worker is gone, or listens where we cannot reach it."""
        if one.welcomed:
            return
        if one.peer is None:
            self.leave(one.host, "its worker is gone")
        elif time.monotonic() - one.offered_s > _REACH_S:
            self.send_away(one.host, f"the job could not reach {one.host.name} within {_REACH_S:g} s")

    # Coming and going

    def welcome(self, host: Host) -> list[str]:
        """The host was reached: returns the names of the executors to be started there."""
        one = self._present.get(host.name)
        if one is None or one.welcomed:
            return []
        while len(one.names) < one.replicas:
            one.names.append(f"{self._role.name}/{self._next_index}")
            self._next_index += 1
        one.executors = one.names[: one.replicas]
        if one.peer is not None:
            one.peer.send(JoinAccepted(tuple(one.executors)))
        return list(one.executors)

    def leave(self, host: Host, reason: str) -> None:
        """The host is gone. If its worker lives, the end of the connection tells it, and it offers itself again."""
        one = self._present.pop(host.name, None)
        if one is None:
            return
        executors, one.executors = one.executors, []
        self._on_left(host, executors, reason)
        if one.peer is not None:
            one.peer.close()
            one.peer = None

    def send_away(self, host: Host, reason: str) -> None:
        """Let the host go, and tell its worker not to come again."""
        if (one := self._present.get(host.name)) is not None and one.peer is not None:
            one.peer.send(JoinRefused(reason))
        self.leave(host, reason)

    def dismiss(self, executor: str, reason: str) -> None:
        """One executor is not wanted any more; a host without any is sent away."""
        one = next((one for one in self._present.values() if executor in one.executors), None)
        if one is None:
            return
        one.executors.remove(executor)
        if not one.executors:
            self.send_away(one.host, reason)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
