"""Selects the transport of weights from where both ends run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from llamarl.errors import ConfigError
from llamarl.process_groups import interface_for

Transport = Literal["memfd", "cuda", "group"]
RequestedTransport = Literal["auto", "memfd", "cuda"]


class Place(Struct, frozen=True):
    """Host and device of one rank."""

    host: str
    device: str  # cpu, or cuda:N


def select_transport(
    writers: Sequence[Place],
    readers: Sequence[Place],
    trusted_network: str = "",
    can_reach: Callable[[int, int], bool] = lambda reader, writer: True,
) -> Transport:
    """Device memory where all ranks are on GPUs of one host that reach each other, otherwise host memory on one host, and a
    process group between hosts, which is refused unless the user trusts the network. `can_reach(reader, writer)` is asked for
    pairs of different GPUs, like torch.cuda.can_device_access_peer."""
    places = [*writers, *readers]
    hosts = list(dict.fromkeys(place.host for place in places))
    if len(hosts) > 1:
        interface_for(hosts, trusted_network)
        return "group"
    gpus = [[_gpu(place) for place in side] for side in (writers, readers)]
    pairs = {(reader, writer) for writer in gpus[0] for reader in gpus[1]}
    if all(reader >= 0 <= writer and (reader == writer or can_reach(reader, writer)) for reader, writer in pairs):
        return "cuda"
    return "memfd"


def settle_transport(requested: RequestedTransport, possible: Transport) -> Transport:
    """The transport that the user asks for, if it is possible. Host memory is possible wherever device memory is."""
    if requested == "cuda" != possible:
        raise ConfigError(
            "weights.transport: cuda needs the trainer and all generators on GPUs of one host that reach each other; "
            "leave it at auto"
        )
    return "memfd" if requested == "memfd" and possible == "cuda" else possible


def _gpu(place: Place) -> int:
    kind, _, index = place.device.partition(":")
    return int(index or 0) if kind == "cuda" else -1
