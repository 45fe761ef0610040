"""`sandbox`: limits for programs that the policy writes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section


class SandboxConfig(Section, frozen=True):
    """Limits for one run of a program that the policy wrote; see docs/sandbox.md."""

    cpu_s: Annotated[float, Meta(gt=0, le=3600, description="CPU time of each process, in whole seconds")] = 4.0
    wall_s: Annotated[float, Meta(gt=0, le=3600, description="wall time of one run, after which it is killed")] = 8.0
    answer_s: Annotated[
        float, Meta(gt=0, le=36_000, description="time for all tests of one answer; tests not reached count as failed")
    ] = 30.0
    memory_mb: Annotated[int, Meta(ge=48, description="address space of each process")] = 256
    processes: Annotated[int, Meta(ge=1, le=1000, description="processes and threads at once")] = 16
    file_mb: Annotated[
        int, Meta(ge=0, description="total size of the files a run writes; they are deleted after it")
    ] = 16
    output_kb: Annotated[
        int, Meta(ge=1, le=1 << 16, description="size of the output, beyond which a run is killed")
    ] = 64
    python: Annotated[
        str, Meta(description="interpreter, used with its installed packages; empty: this one, standard library only")
    ] = ""

    @property
    def patience_s(self) -> float:
        """Longest time for one run, including setup and teardown of the sandbox."""
        return self.wall_s + 3.0
