"""What every section of the settings is made of, and the kinds of value that several have."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block of the YAML file."""


Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")]
Threads = Annotated[int, Meta(ge=0, description="CPU threads of each process; 0: one for each core")]
