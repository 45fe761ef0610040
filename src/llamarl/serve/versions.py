"""Runs of policy versions over tokens."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from llamarl.types import VersionRun


def version_runs(versions: Iterable[int]) -> tuple[VersionRun, ...]:
    """Runs of equal versions, in order."""
    return tuple(VersionRun(version, len(list(run))) for version, run in groupby(versions))


def joined_runs(*parts: Iterable[VersionRun]) -> tuple[VersionRun, ...]:
    """The runs of several parts in a row; neighbors of one version become one run."""
    joined: list[VersionRun] = []
    for run in (run for part in parts for run in part):
        if joined and joined[-1].version == run.version:
            joined[-1] = VersionRun(run.version, joined[-1].count + run.count)
        else:
            joined.append(run)
    return tuple(joined)
