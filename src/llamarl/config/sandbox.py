"""`sandbox`: limits of programs that the policy writes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section


class SandboxConfig(Section, frozen=True):
    """Limits of one run of a program that the policy wrote; see docs/sandbox.md."""

    cpu_s: Annotated[
        float, Meta(gt=0, le=3600, description="processor time of each of its processes, in whole seconds")
    ] = 4.0
    wall_s: Annotated[float, Meta(gt=0, le=3600, description="a run that takes longer is ended")] = 8.0
    answer_s: Annotated[
        float, Meta(gt=0, le=36_000, description="for all tests of one answer; those it does not reach are failed")
    ] = 30.0
    memory_mb: Annotated[int, Meta(ge=48, description="address space of each of its processes")] = 256
    processes: Annotated[int, Meta(ge=1, le=1000, description="processes and threads it may have at once")] = 16
    file_mb: Annotated[int, Meta(ge=0, description="of all files together that it writes; they are gone with it")] = 16
    output_kb: Annotated[int, Meta(ge=1, le=1 << 16, description="output beyond this ends the run")] = 64
    python: Annotated[
        str, Meta(description="interpreter, with its installed packages; empty: this one, standard library alone")
    ] = ""

    @property
    def patience_s(self) -> float:
        """For one run, with putting up its walls and taking them down."""
        return self.wall_s + 3.0
