"""Base class of all config sections, and value types that several sections share."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import fields

from llamarl.errors import ConfigError


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block of the YAML file."""


Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")]
Threads = Annotated[int, Meta(ge=0, description="CPU threads per process; 0: one per core")]


class OwnRanks(Section, frozen=True):
    """The ranks of a model that works on batches before the trainer, where it has ranks of its own (`place: own`)."""

    data: Annotated[int, Meta(ge=1, description="place=own: data-parallel ranks (FSDP)")] = 1
    tensor: Annotated[int, Meta(ge=1, description="place=own: tensor-parallel ranks")] = 1
    device: Device = "auto"
    threads: Threads = 0

    @property
    def ranks(self) -> int:
        return self.data * self.tensor


_fields = cache(fields)  # msgspec evaluates all annotations each time


def changed_settings(section: Section) -> list[str]:
    """Names of the settings that differ from their defaults; those that are made anew, such as lists, differ if not empty."""
    found = ((one.name, getattr(section, one.name), one) for one in _fields(type(section)))
    return [name for name, value, one in found if (value if callable(one.default_factory) else value != one.default)]


def check_expert(section: str, expert: int, tensor: int) -> None:
    """ConfigError unless experts can lie whole on parts of the tensor ranks."""
    if tensor % expert:
        raise ConfigError(
            f"{section}.expert: {expert} must divide {section}.tensor={tensor}; experts lie whole on tensor ranks only, not "
            "on data ranks or replicas"
        )
