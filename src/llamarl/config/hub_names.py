"""Names on the Hugging Face Hub, `ORG/NAME` or `ORG/NAME@REVISION`, and where their files lie on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from msgspec import Struct

HubKind = Literal["model", "dataset"]

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w][\w./-]{0,200}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|gz|zst|txt|gguf|safetensors|ya?ml|py)$")


class HubName(Struct, frozen=True):
    """A repository on the hub, at a branch, a tag or a commit."""

    repo: str
    revision: str = ""  # empty: the branch main

    @property
    def commit(self) -> str:
        """The commit that it is pinned to; empty: a branch or a tag, which may move."""
        return self.revision if _COMMIT.fullmatch(self.revision) else ""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def parse_hub_name(text: str) -> HubName | None:
    """The name that a text spells; None if it can only be a path."""
    found = _NAME.fullmatch(text)
    if found is None or "--" in found[1] or ".." in text or _FILE.search(found[1]):
        return None
    return HubName(found[1], found[2] or "")


def name_on_hub(path: str) -> HubName | None:
    """The hub name that a setting holds; None for a file or folder of this machine, which comes before a name."""
    name = parse_hub_name(path)
    if name is None or name.commit:
        return name
    return None if Path(path).exists() else name


def hub_cache() -> Path:
    """Folder of the hub's cache, by the same environment variables as in huggingface_hub."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if own:
        return _expanded(own)
    home = os.environ.get("HF_HOME")
    base = _expanded(home) if home else _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return base / "hub"


def repo_folder(name: HubName, kind: HubKind) -> Path:
    """Folder of a repository in the cache."""
    return hub_cache() / f"{kind}s--{name.repo.replace('/', '--')}"


def pinned_folder(path: str, kind: HubKind) -> Path | None:
    """Folder with the files of `ORG/NAME@COMMIT`, whether they are there yet or not; None for any other text."""
    name = parse_hub_name(path)
    return repo_folder(name, kind) / "snapshots" / name.commit if name and name.commit else None


def name_of_pinned(folder: Path, kind: HubKind) -> HubName | None:
    """The name and commit whose files lie in a folder of the cache: what `pinned_folder` turns into that folder."""
    parts = folder.absolute().parts[-3:]
    if len(parts) < 3 or parts[1] != "snapshots" or not parts[0].startswith(f"{kind}s--"):
        return None
    name = parse_hub_name(f"{parts[0].removeprefix(f'{kind}s--').replace('--', '/')}@{parts[2]}")
    return name if name and name.commit else None


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()
