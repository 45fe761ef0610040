"""Where a snapshot keeps the trainer's two parts, and the hashes that tell whether files are still what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

POLICY = "policy"
OPTIMIZER = "trainer"
_HASH_BYTES = 1 << 20


def hash_files(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """By path inside `folder`."""
    return {str(path.relative_to(folder)): hash_file(path) for path in sorted(files)}


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()
