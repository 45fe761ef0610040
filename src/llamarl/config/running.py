"""How a job runs: its schedule, snapshots and evaluations, where its executors live, how weights reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class Schedule(Section, frozen=True):
    updates: Annotated[int, Meta(ge=1, description="optimizer steps; each makes the next version of the policy")] = 180
    groups_per_update: Annotated[int, Meta(ge=1, description="P: prompts per update")] = 96
    samples_per_group: Annotated[int, Meta(ge=2, description="n: completions per prompt")] = 8
    max_staleness: Annotated[
        int,
        Meta(ge=0, description="S: versions a trained group may lag behind (window=1); 0 is synchronous and on-policy"),
    ] = 1
    window: Annotated[
        int, Meta(ge=1, description="W: at most W-1 younger groups may be trained before the oldest; 1 keeps order")
    ] = 1
    deterministic: Annotated[
        bool,
        Meta(
            description="asynchronous, yet the same seed gives the same bytes: batch u is sampled by version u - S alone"
        ),
    ] = False
    max_restarts: Annotated[
        int, Meta(ge=0, description="restarts of one executor in a row, without any work done, before the job stops")
    ] = 3
    max_attempts: Annotated[
        int, Meta(ge=1, description="a group whose executor died this often while holding it is dropped")
    ] = 3
    probe_every: Annotated[
        int,
        Meta(
            ge=0,
            description="updates between probes, which compare the generator's log-probs with the trainer's; 0: none",
        ),
    ] = 50
    max_skipped: Annotated[
        int, Meta(ge=1, description="updates in a row whose loss or gradient is no number, before the job stops")
    ] = 5

    def __post_init__(self) -> None:
        if self.window > self.num_places:
            raise ConfigError(
                f"schedule.window: {self.window} cannot take effect, since at most (max_staleness + 1) * "
                f"groups_per_update = {self.num_places} groups are under way"
            )
        if self.deterministic and self.window > 1:
            raise ConfigError(
                f"schedule.window: {self.window} lets timing choose the batches, which schedule.deterministic rules out; "
                "set it to 1"
            )

    @property
    def num_groups(self) -> int:
        return self.updates * self.groups_per_update

    @property
    def answers_per_update(self) -> int:
        return self.groups_per_update * self.samples_per_group

    @property
    def num_places(self) -> int:
        """Groups that may be admitted and not yet retired."""
        return (self.max_staleness + 1) * self.groups_per_update

    def sampling_version(self, ordinal: int) -> int:
        """Deterministic mode: the one version that samples this group."""
        return max(0, ordinal // self.groups_per_update - self.max_staleness)

    @property
    def staleness_bound(self) -> int:
        """No token is ever trained on by a version further from the one that sampled its group's first token."""
        return (self.num_places + self.window - 2) // self.groups_per_update


class Snapshots(Section, frozen=True):
    every: Annotated[int, Meta(ge=0, description="updates between snapshots; 0: only one at the end")] = 25
    keep: Annotated[int, Meta(ge=1, description="newest snapshots that are kept")] = 2
    at_end: Annotated[
        Literal["whole", "policy", "none"],
        Meta(
            description="when all updates are made: a whole snapshot; the policy alone, in the model folder's precision, for "
            "runs that nobody will resume; or none"
        ),
    ] = "whole"


class Evaluate(Section, frozen=True):
    prompts: Annotated[int, Meta(ge=0, description="held-out problems answered greedily; 0 switches it off")] = 512
    every: Annotated[int, Meta(ge=0, description="also evaluate every so many updates; 0: only before and after")] = 0
    split: Annotated[
        Literal["held_out", "test"],
        Meta(description="problems that were held out by hash, or the fixed test problems of the task"),
    ] = "held_out"


Address = Annotated[str, Meta(pattern=r"^.+:\d+$")]


class Host(Section, frozen=True):
    """One host of a cluster, on which `llamarl worker` listens."""

    address: Address
    ranks: Annotated[int, Meta(ge=0)] = 0
    roles: tuple[str, ...] = ()


class Engine(Section, frozen=True):
    kind: Annotated[
        Literal["local", "inline", "monarch"],
        Meta(
            description="where executors live: each in a process of its own, or all in this one, in turn, or on several "
            "machines"
        ),
    ] = "local"
    hosts: Annotated[
        tuple[Address | Host, ...],
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
    def all_hosts(self) -> tuple[Host, ...]:
        return tuple(Host(address=host) if isinstance(host, str) else host for host in self.hosts)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Machines, each once: several workers may listen on one."""
        return tuple(dict.fromkeys(host.address.rpartition(":")[0] for host in self.all_hosts))


class Weights(Section, frozen=True):
    lease_s: Annotated[
        float, Meta(gt=0, description="a reader that holds a weight slot longer than this is declared dead")
    ] = 30.0
    transport: Annotated[
        Literal["auto", "memfd", "cuda"],
        Meta(
            description="slots in host memory (memfd) or device memory (cuda: fast, takes twice a rank's weights); auto: "
            "device memory if all sit on GPUs that reach each other"
        ),
    ] = "auto"


class Observe(Section, frozen=True):
    tensorboard: Annotated[bool, Meta(description="also write metrics for TensorBoard into the run folder")] = False
    events_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="size of the controller's event log (some 25 bytes a group), beyond which it is not written on; "
            "0: none",
        ),
    ] = 1024
