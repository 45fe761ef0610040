"""Where a snapshot keeps the trainer's two parts, and the hashes that tell whether files are still what was written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

POLICY = "policy"
OPTIMIZER = "trainer"
MANIFEST = "manifest.json"
_HASH_BYTES = 1 << 20
_MAX_HASHED_AT_ONCE = 8


class SnapshotManifest(Struct, frozen=True):
    """What a whole snapshot holds."""

    version: int
    files: dict[str, str]  # path inside the snapshot -> sha256


def read_manifest(snapshot: Path) -> SnapshotManifest:
    """Raises OSError or MsgspecError where there is none."""
    return msgspec.json.decode((snapshot / MANIFEST).read_bytes(), type=SnapshotManifest)


def keeps_policy_only(snapshot: Path) -> bool:
    """Made at the end of a run with `snapshots.at_end: policy`: there is nothing to go on from. One that has lost its
    trainer's part is something else: its manifest knows of it."""
    try:
        names = list(read_manifest(snapshot).files)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        names = [str(path.relative_to(snapshot)) for path in snapshot.glob("*/*")]
    return any(name.startswith(f"{POLICY}/") for name in names) and not any(
        name.startswith(f"{OPTIMIZER}/") for name in names
    )


def hash_files(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """By path inside `folder`. Several at a time: one core would take longer to hash a large state than to write it."""
    paths = sorted(files)
    with ThreadPoolExecutor(min(_MAX_HASHED_AT_ONCE, os.cpu_count() or 1)) as pool:
        return dict(zip((str(path.relative_to(folder)) for path in paths), pool.map(hash_file, paths), strict=True))


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()
