"""The topology of a job as data: roles, the channels between them, and the order that follows from both.

To add a role, add it and its channels. The controller reads the line and never names a role.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from llamarl.errors import ConfigError

SOURCE = "task"  # the beginning of every line: prompts come from the task, which is not an executor


class Role(Struct, frozen=True, kw_only=True):
    name: str
    unit: Literal[
        "group", "batch", "call"
    ]  # works on one group at a time, on the groups of one update, or on model calls
    done: str  # the state of a group behind this role, as the ledger names it, such as "generated" or "scored"
    executors: int = 1
    ranks: int = 1  # number of processes of one executor; the engine talks to rank 0
    threads: int = 0  # number of cores for each rank; 0: all
    gpu: bool = False  # whether each rank takes a GPU, where there is one
    capacity: int = 1  # number of completions that one executor holds at once (units "group" and "call")
    at_once: int = 0  # number of completions that it works on at once, while the others wait there; 0: all
    restartable: bool = True  # False: its state cannot be restored, so its death ends the job
    repeats: bool = (
        False  # what it leaves for a batch is gone once that is trained; to train it again, it is made again
    )


class Channel(Struct, frozen=True):
    name: str
    kind: Literal[
        "groups", "weights", "calls"
    ]  # groups pass down the line; weights go back; calls go and come back answered
    source: str
    target: str


class Line:
    """Roles in the order in which groups pass them. `weights_source` maps a role that reads weights to their publisher."""

    def __init__(self, roles: Sequence[Role], channels: Sequence[Channel]) -> None:
        by_name = {role.name: role for role in roles}
        _check_names(roles, channels, by_name)
        ordered = [by_name[name] for name in _follow(channels)]
        self.call_role = _call_role(by_name, channels)
        known = {role.name for role in (*ordered, *filter(None, [self.call_role]))}
        if unused := by_name.keys() - known:
            raise ConfigError(f"line: no channel leads to role '{sorted(unused)[0]}'")
        self.channels = tuple(channels)
        self.group_roles = tuple(role for role in ordered if role.unit == "group")
        self.batch_roles = tuple(role for role in ordered if role.unit == "batch")
        if tuple(ordered) != self.group_roles + self.batch_roles:
            raise ConfigError("line: a role that works on groups cannot come after one that works on batches")
        if self.call_role and not any(c.kind == "calls" and c.source == ordered[0].name for c in channels):
            raise ConfigError(f"line: calls come from the first role; '{ordered[0].name}' has no channel of calls")
        if not self.group_roles or not self.batch_roles:
            raise ConfigError("line: needs at least one role for groups and one for batches")
        self.weights_source = {channel.target: channel.source for channel in channels if channel.kind == "weights"}
        for source in self.weights_source.values():
            if by_name[source].unit != "batch":
                raise ConfigError(f"line: '{source}' gives weights but trains no batches")

    @property
    def roles(self) -> tuple[Role, ...]:
        return self.group_roles + self.batch_roles + ((self.call_role,) if self.call_role else ())

    @property
    def sampling_role(self) -> Role:
        """The role that samples: the one that answers calls, else the first on the line."""
        return self.call_role or self.group_roles[0]

    @property
    def publishers(self) -> frozenset[str]:
        return frozenset(self.weights_source.values())


def executor_names(role: Role) -> list[str]:
    return [f"{role.name}/{index}" for index in range(role.executors)]


def role_of(executor: str) -> str:
    return executor.partition("/")[0]


def index_of(executor: str) -> int:
    return int(executor.partition("/")[2])


def _check_names(roles: Sequence[Role], channels: Sequence[Channel], by_name: dict[str, Role]) -> None:
    if len(by_name) != len(roles) or SOURCE in by_name:
        raise ConfigError(f"line: role names must be different, and none may be '{SOURCE}'")
    for role in roles:
        if role.unit == "batch" and role.executors != 1:
            raise ConfigError(f"line: '{role.name}' trains batches in order, so it is one executor (with many ranks)")
    readers: set[str] = set()
    for channel in channels:
        for end in (channel.source, channel.target):
            if end not in by_name and not (end == SOURCE and channel.source == SOURCE):
                raise ConfigError(f"line: channel '{channel.name}' names an unknown role '{end}'")
        if channel.kind == "weights":
            if channel.target in readers:
                raise ConfigError(f"line: '{channel.target}' reads weights from two channels")
            readers.add(channel.target)


def _call_role(by_name: dict[str, Role], channels: Sequence[Channel]) -> Role | None:
    """The role that answers calls, if there is one."""
    found = [by_name[channel.target] for channel in channels if channel.kind == "calls"]
    if len(found) > 1:
        raise ConfigError("line: calls go to one role")
    for role in by_name.values():
        if (role.unit == "call") != (role in found):
            raise ConfigError(
                f"line: '{role.name}' needs unit=call and a channel of calls that leads to it, or neither"
            )
    return found[0] if found else None


def _follow(channels: Sequence[Channel]) -> list[str]:
    """Walk the payload channels from the task to the end of the line."""
    following: dict[str, str] = {}
    for channel in channels:
        if channel.kind != "groups":
            continue
        if channel.source in following:
            raise ConfigError(f"line: two channels leave '{channel.source}'; a line does not branch")
        following[channel.source] = channel.target
    walked: list[str] = []
    name = SOURCE
    while name in following:
        name = following[name]
        if name in walked:
            raise ConfigError(f"line: it returns to '{name}'; only weights flow back")
        walked.append(name)
    return walked
