"""How a rank forms process groups with ranks on other hosts that it gives weights to, or takes them from.

A reader calls a rendezvous when it needs weights and has no group, or a broken one. The engine passes the call on to every
rank that publishes; each serves the new group beside those it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from llamarl.engine.monarch.protocol import AnyRankMessage, RankSpec, RendezvousCall
from llamarl.engine.monarch.rendezvous_store import StoreClient
from llamarl.weights.group import Group, PeerLost
from llamarl.weights.group_transport import GroupWriter


class EngineRendezvous:
    """Rendezvous through stores that the engine keeps: both the publishing and the reading side of one rank."""

    def __init__(self, spec: RankSpec, rank: int, stores: StoreClient, send: Callable[[AnyRankMessage], None]) -> None:
        self._spec, self._rank, self._stores, self._send = spec, rank, stores, send
        self._limit_s = spec.config.weights.lease_s
        self._writer: GroupWriter | None = None
        self._called: list[tuple[str, int]] = []  # calls that came before there was a writer
        self._groups: dict[str, Group] = {}  # by rendezvous
        self._lock = threading.Lock()

    # The side that publishes

    def serve(self, writer: GroupWriter) -> None:
        with self._lock:
            self._writer, called = writer, self._called
        for rendezvous, num_readers in called:
            self.serve_readers(rendezvous, num_readers)

    def serve_readers(self, rendezvous: str, num_readers: int) -> None:
        """Returns at once: a rendezvous takes as long as its slowest rank."""
        with self._lock:
            if self._writer is None:
                self._called.append((rendezvous, num_readers))
                return
        threading.Thread(target=self._serve, args=(self._writer, rendezvous, num_readers), daemon=True).start()

    def _serve(self, writer: GroupWriter, rendezvous: str, num_readers: int) -> None:
        try:
            group = self._join(rendezvous, self._rank, num_readers, writer.device)
            with self._lock:
                self._groups[rendezvous] = group
            writer.serve(group)
        except (PeerLost, RuntimeError) as error:  # the reader died meanwhile; the next one calls another rendezvous
            print(f"rendezvous {rendezvous}: {error}", flush=True)

    def on_reader_gone(self, reader: str) -> None:
        """Close the groups of a dead reader, so that nobody waits for it."""
        with self._lock:
            over = [rendezvous for rendezvous in self._groups if rendezvous.startswith(f"{reader}/")]
            groups = {rendezvous: self._groups.pop(rendezvous) for rendezvous in over}
        for rendezvous, group in groups.items():
            threading.Thread(target=self._close, args=(rendezvous, group), daemon=True).start()

    def _close(self, rendezvous: str, group: Group) -> None:
        group.close()
        self._stores.leave(rendezvous)

    # The side that reads

    def call(self, number: int, num_readers: int, device: torch.device) -> Group:
        """A group with all ranks that publish; the ranks of one executor call this together."""
        rendezvous = f"{self._spec.executor}.{self._spec.incarnation}/{number}"
        if self._rank == 0:
            self._send(RendezvousCall(rendezvous, num_readers))
        return self._join(rendezvous, self._spec.num_writers + self._rank, num_readers, device)

    def _join(self, rendezvous: str, rank: int, num_readers: int, device: torch.device) -> Group:
        store, spec = self._stores.store(rendezvous, self._limit_s), self._spec
        return Group(store, rank, spec.num_writers, num_readers, interface=spec.network, device=device)
