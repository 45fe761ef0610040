"""Models by name: `Qwen/Qwen3-0.6B`, at a revision or not, wherever a model folder can be given."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from llamarl.config import model_folder
from llamarl.config.hub_names import hub_cache, name_on_hub
from llamarl.errors import InputError
from llamarl.hub.client import Unreachable
from llamarl.hub.snapshots import RepoSnapshot, open_snapshot
from llamarl.model.folders import CARRIED_FILES

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"


def fetch_model(path: str, setting: str = "model") -> str:
    """Fetch a model that is named as on the hub, and return its name with the commit. Everything else is returned as it is: a
    folder, the shipped model, or a path that the caller will refuse. `setting`: for errors."""
    name = name_on_hub(path)
    if name is None:
        return path
    snapshot = open_snapshot(name, "model", setting)
    snapshot.fetch(_needed(snapshot))
    if _INDEX in snapshot.sizes and _WEIGHTS not in snapshot.sizes:
        snapshot.fetch(_shards(snapshot))
    snapshot.tell_if_unreachable()
    return str(snapshot.name)


def fetch_model_config(path: str, setting: str = "--model") -> str:
    """Fetch only the config.json of a model on the hub, which says its sizes; returns that file. Everything else is returned
    as it is."""
    name = name_on_hub(path)
    if name is None:
        return path
    snapshot = open_snapshot(name, "model", setting)
    _check_kind(snapshot)
    snapshot.fetch(["config.json"])
    snapshot.tell_if_unreachable()
    return str(model_folder(str(snapshot.name)) / "config.json")


def _needed(snapshot: RepoSnapshot) -> list[str]:
    """Files to fetch, small ones first. Pickles, ONNX, GGUF and folders such as original/ are never among them."""
    _check_kind(snapshot)
    sizes = snapshot.sizes
    weights = _WEIGHTS if _WEIGHTS in sizes else _INDEX
    if weights not in sizes:
        raise _lacks(snapshot, _WEIGHTS)
    return ["config.json", *(file for file in CARRIED_FILES if file in sizes), weights]


def _check_kind(snapshot: RepoSnapshot) -> None:
    if "config.json" not in snapshot.sizes:
        raise _lacks(snapshot, "config.json")


def _lacks(snapshot: RepoSnapshot, file: str) -> InputError:
    if snapshot.unreachable:
        return Unreachable(
            f"{snapshot.unreachable}, and the cache {hub_cache()} holds only a part of it, without {file}"
        )
    return InputError(
        f"{snapshot.setting}: {snapshot.name.repo} has no {file}, so it is no model folder; {_what_else(snapshot.sizes)}"
    )


def _what_else(sizes: Mapping[str, int]) -> str:
    if "adapter_config.json" in sizes:
        return "it is a LoRA adapter: name its base model"
    if any(file.endswith(".gguf") for file in sizes):
        return "it has GGUF files: download one and make a folder of it with `llamarl import-gguf`"
    if any(file.endswith((".bin", ".pt", ".pth")) for file in sizes):
        return "its weights are pickles, which can run code and are not read"
    return f"it has {', '.join(sorted(sizes)[:5]) or 'no files'}"


def _shards(snapshot: RepoSnapshot) -> list[str]:
    """The files that the index names. Its text is not trusted: only names of shards that the repository has count."""
    try:
        index = msgspec.json.decode((snapshot.folder / _INDEX).read_bytes())
        named = sorted({str(file) for file in index["weight_map"].values()})
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{snapshot.setting}: {_INDEX} of {snapshot.name} cannot be read ({error})") from None
    known = {file for file in snapshot.sizes if file.endswith(".safetensors") and "/" not in file}
    if wrong := [file for file in named if file not in known]:
        if snapshot.unreachable:
            raise _lacks(snapshot, wrong[0])
        raise InputError(f"{snapshot.setting}: {_INDEX} of {snapshot.name} names {wrong[0]}, which is not there")
    return named
