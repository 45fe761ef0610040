"""`engine`: which processes and machines executors run on."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section
from llamarl.errors import ConfigError

Address = Annotated[str, Meta(pattern=r"^.+:\d+$")]
HOSTS_THAT_JOIN = "hosts that join"  # stands for their names, which are not known yet


def is_loopback(host: str) -> bool:
    """Whether this name or address means the machine itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class HostConfig(Section, frozen=True):
    """One host of a cluster, on which `llamarl worker` listens."""

    address: Address
    ranks: Annotated[int, Meta(ge=0)] = 0  # 0: no limit
    roles: tuple[str, ...] = ()  # empty: any role


class EngineConfig(Section, frozen=True):
    """Where executors run and how long the engine waits for them; see docs/engines.md."""

    kind: Annotated[
        Literal["local", "inline", "monarch"],
        Meta(
            description="where executors run: each in its own process, all in turn in this process, or on several machines"
        ),
    ] = "local"
    hosts: Annotated[
        tuple[Address | HostConfig, ...],
        Meta(
            description="monarch: HOST:PORT of each worker, or {address, ranks, roles}: how many ranks it has room for "
            "and which roles may run there; empty: this machine only"
        ),
    ] = ()
    join: Annotated[
        str,
        Meta(
            pattern=r"^(.+:\d+)?$",
            description="monarch: HOST:PORT of this machine where workers may join the running job and bring generators "
            "(llamarl worker --join); empty: none may",
        ),
    ] = ""
    certs: Annotated[str, Meta(description="monarch: this machine's certificate folder, made by `llamarl certs`")] = ""
    host_s: Annotated[float, Meta(gt=0, description="monarch: a host that is silent for this long counts as lost")] = (
        10.0
    )
    start_s: Annotated[float, Meta(gt=0, description="time within which an executor must have started")] = 300.0
    silence_s: Annotated[
        float, Meta(gt=0, description="an executor that has work but sends nothing for this long is killed")
    ] = 600.0
    frame_s: Annotated[float, Meta(gt=0, description="local: time within which a message must arrive completely")] = (
        30.0
    )
    keep_compiled: Annotated[
        bool,
        Meta(
            description="keep compiled code and kernels in ~/.cache/llamarl, readable by you alone, so that the next start "
            "is short; false: in temporary folders that are removed at the end"
        ),
    ] = True
    trusted_network: Annotated[
        str,
        Meta(
            pattern=r"^[\w.:-]*$",
            description="network interface over which weights may cross hosts unencrypted (gloo, NCCL); empty: not allowed",
        ),
    ] = ""

    mps: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="local: kernels of a generator and a trainer on one GPU run side by side by NVIDIA's MPS instead of "
            "in time slices: faster, but a kernel that faults may end both; auto: where nvidia-cuda-mps-control is installed"
        ),
    ] = "off"
    mps_trainer_share: Annotated[
        float,
        Meta(
            ge=0.05,
            le=1,
            description="with engine.mps: share of the multiprocessors that the trainer computes on beside a generator, "
            "which finds the others free; one rank, all weights, bfloat16; not every share computes right, see one-gpu.md",
        ),
    ] = 1.0
    share_gpus: Annotated[
        bool,
        Meta(
            description="let several ranks of an executor share a GPU, to try layouts that need more GPUs than are here; "
            "correct, but slower than one rank"
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.mps_trainer_share < 1 and self.mps == "off":
            raise ConfigError("engine.mps_trainer_share: cannot take effect with engine.mps=off; set it to auto or on")

    @property
    def all_hosts(self) -> tuple[HostConfig, ...]:
        """`hosts`, with each plain address turned into a `HostConfig`."""
        return tuple(HostConfig(address=host) if isinstance(host, str) else host for host in self.hosts)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names of the machines without duplicates; several workers may listen on one machine. Machines that may join are one
        name."""
        named = dict.fromkeys(host.address.rpartition(":")[0] for host in self.all_hosts)
        join = self.join.rpartition(":")[0]
        return (*named, *([HOSTS_THAT_JOIN] if join and not is_loopback(join) else []))
