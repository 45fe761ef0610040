"""Base class of all config sections, and value types that several sections share."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block of the YAML file."""


Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")]
Threads = Annotated[int, Meta(ge=0, description="CPU threads per process; 0: one per core")]
