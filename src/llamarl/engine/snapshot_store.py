"""Snapshots on disk: one folder per version, whole or not there at all.

Executors write their parts into a folder whose name begins with a dot. A manifest with the hash of every file follows,
everything is synced, and one rename makes it a snapshot. Older snapshots stay until the new one is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from llamarl.failpoints import failpoint
from llamarl.io.record_log import sync_path
from llamarl.model.training_state import MANIFEST, SnapshotManifest, hash_file, read_manifest


class SnapshotStore:
    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._collecting: int | None = None  # the version whose parts are being written
        self._files: dict[str, str] = {}  # path inside the snapshot -> sha256, of the parts written so far

    def begin(self, version: int) -> Path:
        """The folder for the parts of this version. It is empty, unless other roles have begun the same snapshot; what an
        attempt at another one left is removed."""
        if version != self._collecting:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.give_up()
            failpoint("snapshot.begin")
            self.partial(version).mkdir()
            self._collecting = version
        return self.partial(version)

    def is_collecting(self, version: int) -> bool:
        """False: this attempt was given up."""
        return version == self._collecting

    def add_part(self, version: int, files: Mapping[str, str]) -> None:
        """One role has written these files, with these hashes."""
        if self.is_collecting(version):
            self._files |= files

    def commit(self, version: int) -> None:
        """Turn the parts into a snapshot. OSError leaves the others untouched."""
        partial, final = self.partial(version), self.path(version)
        manifest = partial / MANIFEST
        failpoint("snapshot.manifest")
        with manifest.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(SnapshotManifest(version, self._files)), indent=1))
            file.flush()
            os.fsync(file.fileno())
        for folder in {partial / Path(name).parent for name in self._files} | {partial}:
            sync_path(folder)
        failpoint("snapshot.rename")
        partial.rename(final)
        failpoint("snapshot.renamed")
        sync_path(self._folder)
        self._collecting, self._files = None, {}

    def give_up(self) -> None:
        """Remove what was written of a snapshot that will not be whole."""
        self._collecting, self._files = None, {}
        for path in self._folder.glob(".*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def prune(self, version: int) -> None:
        """The job will never go back behind `version`: of the snapshots up to it, the newest `keep` stay."""
        made = [one for one in self.versions() if one <= version]
        for old in made[: -self._keep]:
            self._discard(old)

    def rewind(self, version: int) -> None:
        """The job goes on from `version`: newer snapshots are damaged, or will be made again."""
        for newer in self.versions():
            if newer > version:
                self._discard(newer)

    def set_aside(self, version: int) -> None:
        """Rename the snapshot, so that no job goes on from it or removes it."""
        aside = self._folder / f"{version}.set-aside"
        if not aside.exists():
            self.path(version).rename(aside)

    def _discard(self, version: int) -> None:
        """Rename first, in one step: half a snapshot never has a snapshot's name."""
        shutil.rmtree(self.partial(version), ignore_errors=True)
        failpoint("snapshot.discard")
        self.path(version).rename(self.partial(version))
        shutil.rmtree(self.partial(version), ignore_errors=True)

    def versions(self) -> list[int]:
        """All versions that have a folder, oldest first; `why_damaged` tells whether they are whole."""
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdigit())

    def newest_whole(self, among: Collection[int] | None = None) -> tuple[int, list[str]]:
        """The newest version that is whole (0, the beginning, if none is), and a line for each newer one that is not."""
        problems: list[str] = []
        for version in reversed(self.versions()):
            if among is not None and version not in among:
                continue
            reason = why_damaged(self.path(version))
            if not reason:
                return version, problems
            problems.append(f"snapshot {version} cannot be used: {reason}")
        return 0, problems

    def path(self, version: int) -> Path:
        return self._folder / str(version)

    def partial(self, version: int) -> Path:
        return self._folder / f".{version}.partial"


def why_damaged(snapshot: Path) -> str:
    """The fault of a snapshot; empty: every file is there with the bytes that were written."""
    try:
        manifest = read_manifest(snapshot)
    except FileNotFoundError:
        return f"no {MANIFEST}"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        return f"{MANIFEST}: {error}"
    if str(manifest.version) != snapshot.name:
        return f"{MANIFEST} is of version {manifest.version}"
    for name, digest in manifest.files.items():
        path = snapshot / name
        try:
            if hash_file(path) != digest:
                return f"{name}: its bytes are not those that were written"
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            return f"{name}: cannot be read: {error.strerror}"
    return ""
