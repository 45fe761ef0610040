"""One commit of a repository on the hub: which files it has, and fetching those that are needed.

Files lie in the cache that `huggingface_hub` and other libraries share. The client writes each file beside its place, checks
its size and renames it, so a file that is there is whole. The list of a commit's files is kept next to them: a commit never
changes, so one that is all here is used without asking the hub again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from llamarl.config.hub_names import HubKind, HubName, hub_cache, repo_folder
from llamarl.errors import InputError
from llamarl.hub.client import (
    Unreachable,
    bars_on_terminals_only,
    endpoint,
    is_offline,
    load_client,
    one_line_errors,
    tell,
)

_MAIN = "main"
_MARGIN_BYTES = 64 << 20  # left free on the disk


class RepoSnapshot(Struct, frozen=True):
    """A commit of a repository, with the sizes of its files."""

    name: HubName  # pinned to the commit
    kind: HubKind
    setting: str  # that names it; for errors
    sizes: dict[str, int]  # file -> bytes
    unreachable: str = ""  # why the hub cannot be asked for more files; empty: it can

    @property
    def folder(self) -> Path:
        return repo_folder(self.name, self.kind) / "snapshots" / self.name.commit

    def fetch(self, files: Sequence[str]) -> None:
        """Bring files to this machine; those that are here already cost nothing."""
        missing = [file for file in files if not self._is_here(file)]
        if not missing:
            return
        if self.unreachable:
            raise Unreachable(f"{self.unreachable}, and {missing[0]} of it is not in the cache {hub_cache()}")
        client = load_client(self.setting, self.name)
        with one_line_errors(self.setting, self.name, self.kind):
            self._download(client, missing)

    def tell_if_unreachable(self) -> None:
        """Say that the cache was used because the hub does not answer. Where it is not to be asked, nothing is said."""
        if self.unreachable and not is_offline():
            tell(f"NOTE: {self.unreachable}; commit {self.name.commit[:8]} is taken from the cache")

    def _download(self, client: ModuleType, files: Sequence[str]) -> None:
        total = sum(self.sizes[file] for file in files)
        self._check_room(total)
        shown = f"{self.name.repo}@{self.name.commit[:8]}"
        tell(f"fetching {shown} from {endpoint()}: {_counted(len(files))}, {_size(total)}")
        done = 0
        with bars_on_terminals_only(client):
            for number, file in enumerate(files, start=1):
                client.hf_hub_download(
                    self.name.repo,
                    file,
                    repo_type=self.kind,
                    revision=self.name.commit,
                    cache_dir=hub_cache(),
                    endpoint=endpoint(),
                    library_name="llamarl",
                )
                done += self.sizes[file]
                if not self._is_here(file):
                    raise InputError(
                        f"{self.setting}: {file} of {self.name} is not as large as the hub says; try it again"
                    )
                tell(f"  {file} ({number} of {len(files)}; {_size(done)} of {_size(total)})")

    def _check_room(self, needed: int) -> None:
        place = hub_cache()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if needed + _MARGIN_BYTES > free:
            raise InputError(
                f"{self.setting}: {self.name} takes {_size(needed)}, and the disk of {hub_cache()} has {_size(free)} free; "
                "free some, or set HF_HOME to another disk"
            )

    def _is_here(self, file: str) -> bool:
        path = self.folder / file
        return path.is_file() and path.stat().st_size == self.sizes[file]


def open_snapshot(name: HubName, kind: HubKind, setting: str) -> RepoSnapshot:
    """The commit that a name stands for, without its files. Asks the hub, unless the commit and its list are known here."""
    known = _recorded(name, kind) if name.commit else None
    if is_offline():
        return _from_cache(name, kind, setting, f"{setting}: HF_HUB_OFFLINE is set, so {name} cannot be fetched")
    if known is not None:
        return RepoSnapshot(name, kind, setting, known)
    try:
        return _from_hub(name, kind, setting)
    except Unreachable as error:
        return _from_cache(name, kind, setting, str(error))


def _from_hub(name: HubName, kind: HubKind, setting: str) -> RepoSnapshot:
    client = load_client(setting, name)
    with one_line_errors(setting, name, kind):
        api = client.HfApi(endpoint=endpoint(), library_name="llamarl")
        info = api.repo_info(name.repo, repo_type=kind, revision=name.revision or None, files_metadata=True)
        sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
        pinned = replace(name, revision=str(info.sha))
        if not pinned.commit or any(_leaves(file) for file in sizes):
            raise InputError(f"{setting}: {endpoint()} answers, but not like the Hugging Face Hub")
    _record(name, pinned, kind, sizes)
    return RepoSnapshot(pinned, kind, setting, sizes)


def _leaves(file: str) -> bool:
    """Whether a file's name would lead out of its folder."""
    return file.startswith("/") or ".." in file.split("/")


def _from_cache(name: HubName, kind: HubKind, setting: str, reason: str) -> RepoSnapshot:
    """What the cache holds of a name. Files that other programs fetched count too."""
    folder = repo_folder(name, kind)
    commit = name.commit or _read_ref(folder, name.revision or _MAIN)
    pinned = replace(name, revision=commit)
    sizes = _recorded(pinned, kind) if pinned.commit else None
    if pinned.commit and sizes is None:
        sizes = _sizes_in(folder / "snapshots" / commit)
    if not sizes:
        raise Unreachable(f"{reason}, and it is not in the cache {hub_cache()}")
    return RepoSnapshot(pinned, kind, setting, sizes, unreachable=reason)


def _sizes_in(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _read_ref(folder: Path, revision: str) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return (folder / "refs" / revision).read_text().strip()
    return ""


def _list_file(name: HubName, kind: HubKind) -> Path:
    return repo_folder(name, kind) / "llamarl" / f"{name.commit}.json"


def _recorded(name: HubName, kind: HubKind) -> dict[str, int] | None:
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(_list_file(name, kind).read_bytes(), type=dict[str, int])
    return None


def _record(asked: HubName, pinned: HubName, kind: HubKind, sizes: Mapping[str, int]) -> None:
    """Keep the list of files, and which commit a branch or tag stands for. A cache that cannot be written only costs a
    question more next time."""
    with suppress(OSError):
        _replace_file(_list_file(pinned, kind), msgspec.json.encode(sizes))
        if not asked.commit:
            _replace_file(repo_folder(pinned, kind) / "refs" / (asked.revision or _MAIN), pinned.commit.encode())


def _replace_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _counted(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
