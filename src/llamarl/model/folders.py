"""What a model folder holds, and one-line errors for paths that are none: common mistakes, each with the way out."""

from __future__ import annotations

import re
from pathlib import Path

EXPECTED = "expected config.json and *.safetensors inside"
ADAPTER_CONFIG = "adapter_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]{0,95}/[\w.-]{1,95}")
_GIT_LFS = b"version https://git-lfs"

CARRIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files beside config and weights: fetched with a model, and copied when it is saved under a new name."""


def no_folder(path: Path) -> str:
    """Error for a path that is no folder."""
    if path.is_file():
        if path.suffix == ".gguf":
            return f"{path}: a GGUF file; make a model folder of it first: llamarl import-gguf {path} DIR"
        return f"{path}: is a file; give the folder that holds it"
    if _HUB_ID.fullmatch(str(path)):
        told = "one on the Hugging Face Hub is written ORG/NAME; from Python, llamarl.hub.models.fetch_model fetches it"
        return f"no folder {path}; {EXPECTED} ({told})"
    return f"no folder {path}; {EXPECTED}"


def no_config(folder: Path) -> str:
    """Error for a folder without config.json."""
    if policy := newest_policy(folder):
        return f"{folder}: is a run folder; the policy of its newest snapshot is {policy}"
    if (folder / "snapshots").is_dir() and (folder / "config.yaml").is_file():
        return f"{folder}: is a run folder without a snapshot yet; a policy is in it after snapshots.every updates"
    for below in (folder / "policy", *sorted((folder / "snapshots").glob("*"))):
        if _is_policy(below):
            return f"{folder}: no config.json; the model is in {below}"
    if (folder / ADAPTER_CONFIG).is_file():
        return (
            f"{folder}: a LoRA adapter; `llamarl merge {folder} DIR` makes a model folder of it and its base; "
            "model.adapter starts training from it"
        )
    if found := next(iter(sorted(folder.glob("*.gguf"))), None):
        return f"{folder}: no config.json; of the GGUF file there: llamarl import-gguf {found} DIR makes a model folder"
    return f"{folder}: no config.json; {EXPECTED}"


def newest_policy(run: Path) -> Path | None:
    """The newest policy among a run folder's snapshots, or None."""
    found = [path for path in (run / "snapshots").glob("*/policy") if path.parent.name.isdigit()]
    whole = [path for path in found if _is_policy(path)]
    return max(whole, key=lambda path: int(path.parent.name), default=None)


def _is_policy(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))


def no_weights(folder: Path) -> str:
    """Error for a folder with config.json and no known safetensors files."""
    others = sorted({path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)})
    if others:
        return (
            f"{folder}: its weights are in {others[0]}, a pickle, which can run code and is not read; convert them: "
            "load the model with transformers and call save_pretrained, which writes model.safetensors"
        )
    if next(folder.glob("*.safetensors"), None):
        return f"{folder}: has *.safetensors, but neither model.safetensors nor model.safetensors.index.json"
    return f"{folder}: no weights; expected model.safetensors or model.safetensors.index.json"


def is_git_lfs_pointer(start: bytes) -> bool:
    """Whether a file begins like a Git LFS pointer, for which `git lfs pull` fetches the real file."""
    return start.startswith(_GIT_LFS[: len(start)]) and bool(start)
