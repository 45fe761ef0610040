"""Where a snapshot keeps policy, critic and their optimizers, and the hashes that show whether its files are unchanged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

POLICY = "policy"
OPTIMIZER = "trainer"
CRITIC = "critic"
CRITIC_OPTIMIZER = "critic_trainer"
MANIFEST = "manifest.json"
_HASH_BYTES = 1 << 20
_MAX_HASHED_AT_ONCE = 8


class StateFolders(NamedTuple):
    """Folders in a snapshot of a model that is trained, and of its optimizer's state."""

    model: str = POLICY
    optimizer: str = OPTIMIZER


OF_POLICY, OF_CRITIC = StateFolders(), StateFolders(CRITIC, CRITIC_OPTIMIZER)


class SnapshotManifest(Struct, frozen=True):
    """The files of a complete snapshot."""

    version: int
    files: dict[str, str]  # path inside the snapshot -> sha256


def read_manifest(snapshot: Path) -> SnapshotManifest:
    """The manifest of a snapshot. Raises OSError or MsgspecError if there is none."""
    return msgspec.json.decode((snapshot / MANIFEST).read_bytes(), type=SnapshotManifest)


def keeps_policy_only(snapshot: Path) -> bool:
    """Whether a snapshot was made with `snapshots.at_end: policy`, so that training cannot go on from it. The manifest tells
    it from a snapshot that has lost its optimizer state."""
    try:
        names = list(read_manifest(snapshot).files)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        names = [str(path.relative_to(snapshot)) for path in snapshot.glob("*/*")]
    return any(name.startswith(f"{POLICY}/") for name in names) and not any(
        name.startswith(f"{OPTIMIZER}/") for name in names
    )


def hash_files(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Maps each path inside `folder` to its sha256. Several at a time, since one core hashes slower than disks write."""
    paths = sorted(files)
    with ThreadPoolExecutor(min(_MAX_HASHED_AT_ONCE, os.cpu_count() or 1)) as pool:
        return dict(zip((str(path.relative_to(folder)) for path in paths), pool.map(hash_file, paths), strict=True))


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
