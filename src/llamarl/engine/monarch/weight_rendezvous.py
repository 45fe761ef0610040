"""Where one rank meets those that it gives weights to, or takes them from, on other hosts.

A reader calls the meeting when it needs weights and has no group, or a broken one. The engine passes the call on to every
rank that publishes; each serves the new group beside those it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from llamarl.engine.monarch.protocol import Anything, RankSpec, RendezvousCall
from llamarl.engine.monarch.rendezvous_store import Asking
from llamarl.weights.group import Group, PeerLost
from llamarl.weights.group_transport import GroupWriter


class EngineRendezvous:
    def __init__(self, birth: RankSpec, rank: int, asking: Asking, say: Callable[[Anything], None]) -> None:
        self._birth, self._rank, self._asking, self._say = birth, rank, asking, say
        self._limit_s = birth.config.weights.lease_s
        self._writer: GroupWriter | None = None
        self._called: list[tuple[str, int]] = []  # before there was a writer
        self._groups: dict[str, Group] = {}
        self._lock = threading.Lock()

    # Who publishes

    def serve(self, writer: GroupWriter) -> None:
        with self._lock:
            self._writer, called = writer, self._called
        for meeting, num_readers in called:
            self.meet_readers(meeting, num_readers)

    def meet_readers(self, meeting: str, num_readers: int) -> None:
        """Returns at once: a meeting takes as long as its slowest rank."""
        with self._lock:
            if self._writer is None:
                self._called.append((meeting, num_readers))
                return
        threading.Thread(target=self._serve, args=(self._writer, meeting, num_readers), daemon=True).start()

    def _serve(self, writer: GroupWriter, meeting: str, num_readers: int) -> None:
        try:
            group = self._join(meeting, self._rank, num_readers, writer.device)
            with self._lock:
                self._groups[meeting] = group
            writer.serve(group)
        except (PeerLost, RuntimeError) as error:  # the reader died on its way; the next one calls another meeting
            print(f"meeting {meeting}: {error}", flush=True)

    def part(self, reader: str) -> None:
        """It is gone: whoever waits for it is woken."""
        with self._lock:
            over = [meeting for meeting in self._groups if meeting.startswith(f"{reader}/")]
            groups = {meeting: self._groups.pop(meeting) for meeting in over}
        for meeting, group in groups.items():
            threading.Thread(target=self._close, args=(meeting, group), daemon=True).start()

    def _close(self, meeting: str, group: Group) -> None:
        group.close()
        self._asking.leave(meeting)

    # Who reads

    def call(self, number: int, num_readers: int, device: torch.device) -> Group:
        """A meeting with all that publish; the ranks of one executor call it together."""
        meeting = f"{self._birth.executor}.{self._birth.incarnation}/{number}"
        if self._rank == 0:
            self._say(RendezvousCall(meeting, num_readers))
        return self._join(meeting, self._birth.num_writers + self._rank, num_readers, device)

    def _join(self, meeting: str, rank: int, num_readers: int, device: torch.device) -> Group:
        store = self._asking.store(meeting, self._limit_s)
        birth = self._birth
        return Group(store, rank, birth.num_writers, num_readers, interface=birth.network, device=device)
