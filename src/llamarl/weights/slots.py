"""Weight slots: two per rank that publishes, so that one can be written while the other is read.

A writer marks its slot invalid, fills it, and only then writes the version. A reader takes a lease on the slots of all ranks
and checks that all hold the same edition of its version. So a publication is visible whole or not at all. The optimizer never
writes into a slot, and no product reads from one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llamarl.errors import BrokenWeights, CorruptWeights, InputError, StaleWeights
from llamarl.failpoints import failpoint
from llamarl.model.shards import Parameters
from llamarl.weights.memory import HOST, ShardRead, SlotManifest, blocks_of
from llamarl.weights.rank_slots import RankSlots, device_of, find, read_manifest, settle
from llamarl.weights.read_plan import ReadPlan
from llamarl.weights.slot_file import NO_VERSION, NUM_SLOTS, Header, SlotFile
from llamarl.weights.transport import Publication
from llamarl.weights.wire import CombineMax, Staging, WireFormat

_CHECKSUM = 32  # bytes

Agree = Callable[[Tensor], None]  # takes the maximum over all ranks that publish, in place


def alone(flags: Tensor) -> None:
    """`Agree` of a single rank: a no-op."""


def agreed(agree: Agree, value: int) -> int:
    """The largest value of all ranks; also a barrier."""
    flags = torch.tensor([value], dtype=torch.int64)
    agree(flags)
    return int(flags.item())


class SlotWriter:
    """The end of one trainer rank. `combine_max` takes the maximum over ranks that share rows (see `wire.py`)."""

    def __init__(
        self,
        file: SlotFile,
        parameters: Parameters,
        *,
        lease_s: float,
        on_stuck: Callable[[int], None] = lambda pid: None,
        wire: WireFormat | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        agree: Agree = alone,
        combine_max: CombineMax | None = None,
        device: int = HOST,
    ) -> None:
        self._file, self._rank, self._num_ranks = file, rank, num_ranks
        self._lease_s, self._on_stuck, self._agree = lease_s, on_stuck, agree
        self._staging = Staging(parameters, wire or WireFormat(), combine_max)
        self._manifest = SlotManifest(self._staging.slot_shards, self._staging.layout.num_bytes, device)
        self._slots: RankSlots | None = None

    @torch.no_grad()
    def publish(self, version: int) -> Publication:
        slot, edition = version % NUM_SLOTS, agreed(self._agree, time.monotonic_ns())
        slots = self._settled()
        before = self._file.read_header(slot, self._rank)
        with self._file.exclusive(slot, self._rank, self._lease_s, self._on_stuck):
            self._file.write_header(slot, self._rank, Header(NO_VERSION, self._manifest.num_bytes, edition))
            failpoint("publish.fill")
            digests = slots.memory.write(slot, self._staging)
            slots.write_digests(slot, digests)
            failpoint("publish.filled")
            checksum = hashlib.blake2b(digests, digest_size=_CHECKSUM).digest()
            self._file.write_header(slot, self._rank, Header(version, self._manifest.num_bytes, edition, checksum))
        changed = before.version != version or before.checksum != checksum
        return self._publication(version, slot, bool(agreed(self._agree, int(changed))))

    def _settled(self) -> RankSlots:
        if self._slots is None:
            self._slots = settle(self._file, self._rank, self._num_ranks, self._manifest, self._lease_s, self._on_stuck)
        return self._slots

    def _publication(self, version: int, slot: int, changed: bool) -> Publication:
        headers = [self._file.read_header(slot, rank) for rank in range(self._num_ranks)]
        checksum = headers[0].checksum
        if len(headers) > 1:
            checksums = b"".join(header.checksum for header in headers)
            checksum = hashlib.blake2b(checksums, digest_size=_CHECKSUM).digest()
        return Publication(version, checksum.hex(), sum(header.num_bytes for header in headers), changed)


class SlotReader:
    """The end of one generator rank."""

    def __init__(self, file: SlotFile, parameters: Parameters) -> None:
        self._file, self._plan = file, ReadPlan(parameters)
        self._device = device_of([shard.tensor for shard in self._plan.shards.values()])
        self._found: list[RankSlots] = []  # by rank
        self._sources: list[Source] = []  # ranks that it reads from
        self._held = Header()  # version and edition of its weights

    @torch.no_grad()
    def load(self, version: int) -> int:
        """Verifies and copies a version. Where the other slot is leased and still holds the reader's current weights, this is
        one pass over memory, since the reader can go back. Otherwise the version is verified before it is copied."""
        slot = version % NUM_SLOTS
        with self._file.lease(slot), self._file.try_lease(_other(slot)) as leased:
            failpoint("lease.taken")
            headers = self._headers(version, slot)
            self._find_sources(version, len(headers))
            if leased and self._is_in(_other(slot)):
                self._read_digested(slot, headers)
            else:
                self._read_verified(slot, headers)
        failpoint("lease.released")
        self._held = headers[0]
        return sum(source.num_bytes for source in self._sources)

    def _read_verified(self, slot: int, headers: Sequence[Header]) -> None:
        for source in self._sources:
            source.verify(slot, headers[source.rank])
        for source in self._sources:
            source.slots.memory.read(slot, source.reads)

    def _read_digested(self, slot: int, headers: Sequence[Header]) -> None:
        written = [source.written_digests(slot, headers[source.rank]) for source in self._sources]
        before, self._held = self._held, Header()
        sound = [source.read_digested(slot, digests) for source, digests in zip(self._sources, written, strict=True)]
        if not all(sound):
            self._go_back(_other(slot))
            self._held = before
            raise CorruptWeights(f"weights: version {headers[0].version} does not match its checksum")

    def _go_back(self, slot: int) -> None:
        headers = [self._file.read_header(slot, rank) for rank in range(len(self._found))]
        try:
            self._read_verified(slot, headers)
        except CorruptWeights as error:
            raise BrokenWeights(
                f"{error}, nor does the one that was to replace it; the reader's weights are lost"
            ) from None

    def _is_in(self, slot: int) -> bool:
        """Whether a slot of all ranks holds the reader's current weights."""
        held = (self._held.version, self._held.edition)
        headers = (self._file.read_header(slot, rank) for rank in range(len(self._found)))
        return self._held.version != NO_VERSION and all((one.version, one.edition) == held for one in headers)

    def _headers(self, version: int, slot: int) -> list[Header]:
        ranks = range(self._file.read_rank(0).num_ranks)
        headers = [self._file.read_header(slot, rank) for rank in ranks]
        if not headers or any(header.version != version for header in headers):
            raise StaleWeights(f"weights: version {version} is not in its slot any more")
        if len({header.edition for header in headers}) > 1:
            raise StaleWeights(f"weights: version {version} is being published again")
        return headers

    def _find_sources(self, version: int, num_ranks: int) -> None:
        """Plans the reads from every rank: once, and again when a restarted writer has other memory or another layout."""
        records = [self._file.read_rank(rank) for rank in range(num_ranks)]
        manifests = [read_manifest(self._file, record) for record in records]
        if [(source.record, source.encoded) for source in self._found] == list(zip(records, manifests, strict=True)):
            return
        found = [find(self._file, rank, self._device) for rank in range(num_ranks)]
        try:
            reads = self._plan.reads([slots.manifest for slots in found])
        except InputError as error:
            raise CorruptWeights(f"{error} (version {version})") from None
        self._found, self._held = found, Header()
        self._sources = [Source(rank, found[rank], own) for rank, own in sorted(reads.items())]


class Source:
    """The reads of one reader from one rank that publishes."""

    def __init__(self, rank: int, slots: RankSlots, reads: Sequence[ShardRead]) -> None:
        self.rank, self.slots, self.reads = rank, slots, reads
        self._blocks = blocks_of(reads, slots.memory.block_bytes)
        self.num_bytes = sum(read.num_bytes for read in reads)

    def verify(self, slot: int, header: Header) -> None:
        if self.slots.memory.digests(slot, self._blocks) != self.written_digests(slot, header):
            raise CorruptWeights(f"weights: version {header.version} does not match its checksum")

    def read_digested(self, slot: int, written: bytes) -> bool:
        """Fills the reader's weights; returns whether they are the published ones."""
        return self.slots.memory.read_digested(slot, self.reads, self._blocks) == written

    def written_digests(self, slot: int, header: Header) -> bytes:
        """Published digests of the blocks that are read."""
        written = self.slots.read_digests(slot)
        if hashlib.blake2b(written, digest_size=_CHECKSUM).digest() != header.checksum:
            raise CorruptWeights(f"weights: the digests of version {header.version} do not match its checksum")
        return self.slots.picked(written, self._blocks)


def _other(slot: int) -> int:
    return (slot + 1) % NUM_SLOTS
