"""Ranks of which the first crashes as native code does, so often, and leaves a file behind each time."""

from __future__ import annotations

import os
from pathlib import Path


def main(rank: int, count: int, folder: str, times: str, marks: str) -> None:
    if rank:
        return
    crashed = list(Path(marks).parent.glob(f"{Path(marks).name}*"))
    assert not (Path(folder) / "left").exists(), "what a crashed rank left is in the way of the next one"
    if len(crashed) < int(times):
        (Path(folder) / "left").touch()
        Path(f"{marks}{len(crashed)}").touch()
        os.abort()
