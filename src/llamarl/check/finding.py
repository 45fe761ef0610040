"""One line of a check: what was looked at, how it is, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from llamarl.machine import GIB

State = Literal["ok", "warning", "problem"]


class Finding(Struct, frozen=True, omit_defaults=True):
    """Something that was looked at. A problem keeps a job from running; a warning may, or makes it slow."""

    what: str
    state: State
    told: str
    advice: str = ""  # what to do about it

    def line(self) -> str:
        return f"{self.state:<8} {self.what:<12} {self.told}{f'; {self.advice}' if self.advice else ''}"


def has_problem(findings: Sequence[Finding]) -> bool:
    return any(finding.state == "problem" for finding in findings)


def gib(num_bytes: float) -> str:
    """A size for people: GiB, or MiB if it is small."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.0f} MiB"
