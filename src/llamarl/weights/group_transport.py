"""Weights over a process group: every reader pulls its shards from the slots of the ranks that hold them.

A writer keeps two slots in its own memory, as in shared memory, and one thread for each reader. A load asks all its sources
for a version. When all hold the same edition of it, the reader tells them to send, and the shards come in buckets, each with
a digest. The reader's weights change only after the last bucket has been verified. While a source sends, its slot is not
written.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor

from llamarl.errors import CorruptWeights, LeaseTimeout, LostWeights, StaleWeights
from llamarl.layout.boxes import volume
from llamarl.layout.cost import BUCKET_BYTES
from llamarl.layout.plan import TransferPlan, plan_transfer, reshardings_of
from llamarl.model.shards import Parameters
from llamarl.weights.buckets import Bucket, Copies, Route, buckets_of, copies_in, copies_out, is_sound, pack
from llamarl.weights.group import Deadline, Group, PeerLost, RankShards
from llamarl.weights.memory import HOST, HostMemory, SlotMemory, copy_tensor, on_own_stream, padded
from llamarl.weights.rank_slots import device_of
from llamarl.weights.read_plan import ReadPlan
from llamarl.weights.slot_file import NUM_SLOTS, Header
from llamarl.weights.slots import Agree, agreed, alone
from llamarl.weights.transport import Publication
from llamarl.weights.wire import CombineMax, Staging, WireFormat

_ASK, _ANSWER, _GO, _BUCKET = 1, 2, 3, 4
_RENDEZVOUS_S = 300.0


class GroupWriter:
    """The end of one trainer rank. `serve` answers the readers of a group; a restarted reader brings a new group."""

    def __init__(
        self,
        parameters: Parameters,
        *,
        lease_s: float,
        wire: WireFormat | None = None,
        agree: Agree = alone,
        combine_max: CombineMax | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._staging = Staging(parameters, wire or WireFormat(), combine_max)
        self._lease_s, self._agree, self._bucket_bytes = lease_s, agree, bucket_bytes
        self._slot_shards = {shard.name: shard for shard in self._staging.slot_shards}
        num_bytes = self._staging.layout.num_bytes
        self._device = device_of([tensor for _, tensor in self._staging.copied])
        self.device = torch.device("cpu" if self._device == HOST else f"cuda:{self._device}")
        self._memory = _own_memory(num_bytes, self._device)
        self._headers = [Header(), Header()]
        self._leases: list[list[str]] = [[], []]  # by slot: readers that it is being sent to
        self._changed = threading.Condition()

    def serve(self, group: Group) -> None:
        routes = _routes(
            group, group.exchange(RankShards(self._staging.slot_shards), _RENDEZVOUS_S), self._bucket_bytes
        )
        for target in range(group.num_readers):
            if buckets := routes.get(Route(group.rank, target)):
                threading.Thread(target=self._answer, args=(group, target, buckets), daemon=True).start()

    @torch.no_grad()
    def publish(self, version: int) -> Publication:
        slot, edition = version % NUM_SLOTS, agreed(self._agree, time.monotonic_ns())
        before = self._headers[slot]
        self._close(slot)
        digests = self._memory.write(slot, self._staging)
        checksum = hashlib.blake2b(digests, digest_size=32).digest()
        num_bytes = self._staging.layout.num_bytes
        with self._changed:
            self._headers[slot] = Header(version, num_bytes, edition, checksum)
        changed = before.version != version or before.checksum != checksum
        return Publication(version, checksum.hex(), num_bytes, bool(agreed(self._agree, int(changed))))

    def _close(self, slot: int) -> None:
        """Marks a slot invalid, then waits until it is sent to no reader."""
        with self._changed:
            self._headers[slot] = Header()
            # Sending ends within lease_s, whatever the reader does; twice that is a bug.
            if not self._changed.wait_for(lambda: not self._leases[slot], timeout=2 * self._lease_s):
                raise LeaseTimeout(
                    f"{self._leases[slot][0]} keeps its lease on weight slot {slot} for over {self._lease_s} s"
                )

    @contextmanager
    def _lease(self, slot: int, reader: str) -> Iterator[Header]:
        with self._changed:
            header = self._headers[slot]
            self._leases[slot].append(reader)
        try:
            yield header
        finally:
            with self._changed:
                self._leases[slot].remove(reader)
                self._changed.notify_all()

    def _answer(self, group: Group, target: int, buckets: Sequence[Bucket]) -> None:
        """The thread of one reader: answers it until the reader, or this process, is gone."""
        peer, outgoing = group.num_writers + target, dict[int, list[Outgoing]]()
        largest = max(bucket.num_bytes for bucket in buckets)
        buffers = [_buffer(largest, self._device) for _ in range(min(2, len(buckets)))]
        with suppress(PeerLost), on_own_stream(self._device):
            group.connect(peer)
            while True:
                (version,) = group.receive_ints(peer, 1, _ASK)
                slot, deadline = version % NUM_SLOTS, Deadline(self._lease_s)
                with self._lease(slot, f"generator rank {target}") as header:
                    group.send_ints(peer, [header.version, header.edition], _ANSWER, deadline)
                    if group.receive_ints(peer, 1, _GO, deadline) == [1]:
                        if slot not in outgoing:
                            outgoing[slot] = self._outgoing(buckets, slot, buffers)
                        _send(group, peer, outgoing[slot], deadline)

    def _outgoing(self, buckets: Sequence[Bucket], slot: int, buffers: Sequence[Tensor]) -> list[Outgoing]:
        found, data = [], self._memory.data(slot)
        for index, bucket in enumerate(buckets):
            message = buffers[index % 2][: bucket.num_bytes]
            found.append(Outgoing(message, copies_in(bucket, self._slot_shards, data, message)))
        return found


class Outgoing(NamedTuple):
    """A bucket to send, and the copies that fill it. Two buffers take turns: one is packed while the other is sent."""

    message: Tensor
    copies: Copies


def _send(group: Group, peer: int, buckets: Sequence[Outgoing], deadline: Deadline) -> None:
    pending = None
    for message, copies in buckets:
        pack(copies, message)
        if pending is not None:
            group.finish(pending, peer, deadline)
        pending = group.send(peer, message, _BUCKET)
    if pending is not None:
        group.finish(pending, peer, deadline)


class Incoming(NamedTuple):
    """Buckets from one source: the buffers that keep them until all are verified, and the copies to make then."""

    source: int
    messages: Sequence[Tensor]
    copies: Copies


class GroupReader:
    """The end of one generator rank. After its group has lost a rank, a new reader with a new group is needed."""

    def __init__(
        self, group: Group, parameters: Parameters, *, deadline_s: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._group, self._deadline_s = group, deadline_s
        plan = ReadPlan(parameters)
        self._shards, self._device = plan.shards, device_of([shard.tensor for shard in plan.shards.values()])
        held = group.exchange(RankShards(plan.slot_shards), _RENDEZVOUS_S)
        plan.check([one.shards for one in held[: group.num_writers]], cast=False)
        routes = _routes(group, held, bucket_bytes)
        mine = group.rank - group.num_writers
        self._incoming = [
            self._incoming_from(route.source, buckets)
            for route, buckets in sorted(routes.items())
            if route.target == mine
        ]
        for incoming in self._incoming:
            group.connect(incoming.source)
        self._num_bytes = sum(volume(shard.box) * shard.tensor.itemsize for shard in self._shards.values())
        self._pool = ThreadPoolExecutor(max(1, len(self._incoming)))
        self._lost = ""

    @torch.no_grad()
    def load(self, version: int) -> int:
        if self._lost:
            raise LostWeights(f"weights: version {version} cannot be had: {self._lost}")
        deadline = Deadline(self._deadline_s)
        try:
            self._agree_on(version, deadline)
            sound = list(self._pool.map(lambda incoming: self._receive(incoming, deadline), self._incoming))
        except PeerLost as error:
            self._lost = str(error)
            self._group.close()  # so that no living source waits for this reader
            raise LostWeights(f"weights: version {version} cannot be had: {error}") from None
        if not all(sound):
            raise CorruptWeights(f"weights: version {version} does not match its checksum")
        for incoming in self._incoming:
            for target, received in incoming.copies:
                copy_tensor(target, received)
        return self._num_bytes

    def _incoming_from(self, source: int, buckets: Sequence[Bucket]) -> Incoming:
        messages = [_buffer(bucket.num_bytes, self._device) for bucket in buckets]
        pairs = zip(buckets, messages, strict=True)
        return Incoming(
            source, messages, [copy for one, message in pairs for copy in copies_out(one, self._shards, message)]
        )

    def _agree_on(self, version: int, deadline: Deadline) -> None:
        """Checks that all sources hold the same edition of the version; only then does any of them send."""
        for incoming in self._incoming:
            self._group.send_ints(incoming.source, [version], _ASK, deadline)
        answers = [self._group.receive_ints(incoming.source, 2, _ANSWER, deadline) for incoming in self._incoming]
        agreed = len({tuple(answer) for answer in answers}) <= 1 and all(found == version for found, _ in answers)
        for incoming in self._incoming:
            self._group.send_ints(incoming.source, [int(agreed)], _GO, deadline)
        if not agreed:
            held = sorted({found for found, _ in answers} - {version})
            again = "is being published again" if not held else "is not in its slot any more"
            raise StaleWeights(f"weights: version {version} {again}")

    def _receive(self, incoming: Incoming, deadline: Deadline) -> bool:
        """Receives all buckets, even after a damaged one, so that both ends stay in step; returns whether all are sound."""
        sound = True
        with on_own_stream(self._device):
            works = [self._group.receive(incoming.source, message, _BUCKET) for message in incoming.messages]
            for work, message in zip(works, incoming.messages, strict=True):
                self._group.finish(work, incoming.source, deadline)
                sound = is_sound(message) and sound
        return sound


def _own_memory(num_bytes: int, device: int) -> SlotMemory:
    """Memory of two slots that no other process sees."""
    if device == HOST:
        return HostMemory(mmap.mmap(-1, max(1, NUM_SLOTS * padded(num_bytes))), 0, num_bytes)
    from llamarl.weights.cuda_slots import CudaMemory

    return CudaMemory.private(num_bytes, device)


def _buffer(num_bytes: int, device: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu" if device == HOST else torch.device("cuda", device))


def plan_of(group: Group, held: Sequence[RankShards]) -> TransferPlan:
    """The plan that every rank of a group computes for itself, from the shards of all ranks."""
    ranks = [{shard.name: shard.spec for shard in one.shards} for one in held]
    sources, targets = ranks[: group.num_writers], ranks[group.num_writers :]
    return plan_transfer(reshardings_of(sources, targets), len(sources), len(targets))


def _routes(group: Group, held: Sequence[RankShards], bucket_bytes: int) -> dict[Route, list[Bucket]]:
    return buckets_of(plan_of(group, held), bucket_bytes)
