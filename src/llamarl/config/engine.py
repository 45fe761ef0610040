"""`engine`: where executors live."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section

Address = Annotated[str, Meta(pattern=r"^.+:\d+$")]


class HostConfig(Section, frozen=True):
    """One host of a cluster, on which `llamarl worker` listens."""

    address: Address
    ranks: Annotated[int, Meta(ge=0)] = 0
    roles: tuple[str, ...] = ()


class EngineConfig(Section, frozen=True):
    kind: Annotated[
        Literal["local", "inline", "monarch"],
        Meta(
            description="where executors live: each in a process of its own, or all in this one, in turn, or on several "
            "machines"
        ),
    ] = "local"
    hosts: Annotated[
        tuple[Address | HostConfig, ...],
        Meta(
            description="monarch: HOST:PORT of each worker, or {address, ranks, roles} with how many ranks there is room "
            "for and which roles may live there; empty: all on this machine"
        ),
    ] = ()
    certs: Annotated[
        str, Meta(description="monarch: this machine's folder of certificates, made by `llamarl certs`")
    ] = ""
    host_s: Annotated[float, Meta(gt=0, description="monarch: a host that is silent for so long is taken for lost")] = (
        10.0
    )
    start_s: Annotated[float, Meta(gt=0, description="an executor must be up within this time")] = 300.0
    silence_s: Annotated[
        float, Meta(gt=0, description="an executor with work to do that says nothing for so long is killed")
    ] = 600.0
    frame_s: Annotated[float, Meta(gt=0, description="local: a message must arrive whole within this time")] = 30.0
    trusted_network: Annotated[
        str,
        Meta(
            pattern=r"^[\w.:-]*$",
            description="interface over which weights may cross hosts, in the clear (gloo, NCCL); empty: they may not",
        ),
    ] = ""

    @property
    def all_hosts(self) -> tuple[HostConfig, ...]:
        return tuple(HostConfig(address=host) if isinstance(host, str) else host for host in self.hosts)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Machines, each once: several workers may listen on one."""
        return tuple(dict.fromkeys(host.address.rpartition(":")[0] for host in self.all_hosts))
