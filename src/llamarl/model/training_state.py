"""All that a trainer is made of, on disk: the policy as a Hugging Face folder, and the optimizer's state beside it.

The state is copied to host memory first, which is all the trainer waits for; hashing and writing go on in a thread.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from llamarl.errors import ModelError
from llamarl.model.checkpoint import empty_model, save_model
from llamarl.model.safetensors_file import read_spans
from llamarl.model.tensor_io import read_tensor, write_tensors
from llamarl.model.transformer import Transformer

POLICY = "policy"
OPTIMIZER = "trainer"
_FILE_BYTES = 2 << 30
_HASH_BYTES = 1 << 20


class TrainingState:
    """A copy of model and optimizer in host memory, made anew with `take` and written with `write`."""

    def __init__(self, model: Transformer, optimizer: torch.optim.Optimizer, carry_from: Path) -> None:
        self._model, self._optimizer, self._carry_from = model, optimizer, carry_from
        dtype = model.lm_head.weight.dtype
        self._copy = empty_model(model.shape, dtype=dtype, device="cpu")
        self._optimizer_copy: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self) -> None:
        copies = dict(self._copy.named_parameters())
        for name, parameter in self._model.named_parameters():
            copies[name].copy_(parameter)
        for name, tensor in optimizer_tensors(self._model, self._optimizer).items():
            if name not in self._optimizer_copy:
                self._optimizer_copy[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._optimizer_copy[name].copy_(tensor)

    def write(self, folder: Path) -> dict[str, str]:
        """Two subfolders of `folder`; returns the sha256 of every file in them, by its path inside `folder`."""
        for name in (POLICY, OPTIMIZER):
            shutil.rmtree(folder / name, ignore_errors=True)  # of an attempt that was given up
        save_model(self._copy, folder / POLICY, carry_from=self._carry_from)
        target = folder / OPTIMIZER
        target.mkdir(parents=True)
        for number, part in enumerate(_parts(self._optimizer_copy)):
            path = target / f"optimizer-{number:05}.safetensors"
            write_tensors(path, part, torch.float32)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return hash_files(folder, (POLICY, OPTIMIZER))


@torch.no_grad()
def restore_optimizer(model: Transformer, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Bring back what `write` saved; the model itself is loaded from the policy folder like any other."""
    spans = {}
    for path in sorted((folder / OPTIMIZER).glob("*.safetensors")):
        spans.update(read_spans(path))
    for name, parameter in model.named_parameters():
        mine = {key.removeprefix(f"{name}/"): span for key, span in spans.items() if key.startswith(f"{name}/")}
        if not mine:
            continue  # a parameter that no update has touched
        state = optimizer.state[parameter]
        for key, span in mine.items():
            device = "cpu" if key == "step" else parameter.device
            state[key] = torch.empty(span.shape, dtype=torch.float32, device=device)
            read_tensor(span, state[key], tuple(slice(0, size) for size in span.shape))
    if unknown := {key.partition("/")[0] for key in spans} - dict(model.named_parameters()).keys():
        raise ModelError(f"{folder}: optimizer state of an unknown parameter {min(unknown)}")


def optimizer_tensors(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`parameter/exp_avg` and the like."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def hash_files(folder: Path, parts: tuple[str, ...]) -> dict[str, str]:
    files = sorted(path for part in parts for path in (folder / part).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hash_file(path) for path in files}


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _parts(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in order, cut into files of a size that any file system takes."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > _FILE_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts
