"""The state of a trainer on disk: its model as a Hugging Face folder, and the optimizer's state beside it. Of a policy with
adapters, only these are saved, as a PEFT folder. A critic has folders of its own in the same snapshot.

The state is copied to host memory first, and the trainer waits for nothing else; a thread hashes and writes it. With several
ranks, rank 0 gathers the policy, parameter by parameter, and every rank of the first replica writes its own shards of the
optimizer's state. `restore.py` reads them on any mesh. Other replicas hold the same numbers, which is checked each time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from llamarl.failpoints import failpoint
from llamarl.families.adapters import adapter_parameters
from llamarl.model.adapter_folder import save_adapter
from llamarl.model.checkpoint import empty_model, save_model, widest_dtype
from llamarl.model.spread import is_spread
from llamarl.model.tensor_io import write_tensors
from llamarl.model.training_state import OF_CRITIC, OF_POLICY, StateFolders, hash_files
from llamarl.model.transformer import Transformer
from llamarl.train.mesh import LONE_RANK, TrainerMesh
from llamarl.train.optimizer import AdamW
from llamarl.train.policy import Policy
from llamarl.train.replicas import refuse_drift
from llamarl.train.restore import MESH_FILE, STEPS, MeshOnDisk

_FILE_BYTES = 2 << 30


class TrainingState:
    """A copy of model and optimizer in host memory: `take` makes it, `write` writes it."""

    def __init__(
        self,
        model: Transformer,
        optimizer: AdamW,
        carry_from: Path,
        mesh: TrainerMesh = LONE_RANK,
        folders: StateFolders = OF_POLICY,
    ) -> None:
        self._model, self._optimizer, self._carry_from = model, optimizer, carry_from
        self._mesh, self._folders = mesh, folders
        self._policy_copy: Transformer | None = None
        self._adapter_copy: dict[str, Tensor] = {}
        self._optimizer_copy: dict[str, Tensor] = {}

    @property
    def is_policy(self) -> bool:
        return self._folders == OF_POLICY

    @torch.no_grad()
    def take(self, *, policy_only: bool = False) -> None:
        """Copies the state; every rank calls this at the same time. With `policy_only`, training cannot go on from it, and it
        has the type of the model folder that training began with. JobFailed if replicas have drifted apart."""
        refuse_drift(self._optimizer, self._mesh)
        if self._mesh.replica:
            return
        copies = self._room_for_policy(widest_dtype(self._carry_from) if policy_only else torch.float32)
        parameters = dict(self._model.named_parameters())
        for name, master in self._optimizer.masters():
            whole = gather(master, parameters[name])
            if name in copies:
                copies[name].copy_(whole)
        self._optimizer_copy = {} if policy_only else self._copy_optimizer()

    def _room_for_policy(self, dtype: torch.dtype) -> dict[str, Tensor]:
        if self._mesh.rank > 0:
            return {}
        if self._model.adapters is not None:
            specs = adapter_parameters(self._model.shape, self._model.adapters.lora)
            self._adapter_copy = self._adapter_copy or {name: torch.empty(one.shape) for name, one in specs.items()}
            return self._adapter_copy
        if self._policy_copy is None or self._policy_copy.lm_head.weight.dtype != dtype:
            self._policy_copy = None  # frees the old memory first
            self._policy_copy = empty_model(self._model.shape, dtype=dtype, device="cpu")
        return dict(self._policy_copy.named_parameters())

    def _copy_optimizer(self) -> dict[str, Tensor]:
        copies = self._optimizer_copy
        copies.pop(STEPS, None)  # stays last, also where there were no moments yet: the same state has the same bytes
        for name, tensor in self._optimizer.state_tensors().items():
            if name not in copies:
                copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            copies[name].copy_(tensor)
        return {**copies, STEPS: torch.tensor([float(self._optimizer.num_steps)])}

    def write(self, folder: Path) -> dict[str, str]:
        """Writes this rank's files below `folder`; maps their paths inside `folder` to sha256. A rank touches only its own
        files, also those of an attempt that was given up."""
        files: list[Path] = []
        failpoint("state.policy")
        if self._policy_copy is not None or self._adapter_copy:
            target = folder / self._folders.model
            shutil.rmtree(target, ignore_errors=True)
            self._write_policy(target)
            files += [path for path in target.iterdir() if path.is_file()]
        if self._optimizer_copy:
            files += self._write_optimizer(folder / self._folders.optimizer)
        return hash_files(folder, files)

    def _write_policy(self, folder: Path) -> None:
        if self._policy_copy is not None:
            save_model(self._policy_copy, folder, carry_from=self._carry_from)
        elif self._model.adapters is not None:
            save_adapter(self._adapter_copy, self._model.adapters.lora, self._model.shape, folder, self._carry_from)

    def _write_optimizer(self, target: Path) -> Iterator[Path]:
        target.mkdir(parents=True, exist_ok=True)
        if self._mesh.rank == 0:
            yield _write_mesh(target, self._mesh)
        prefix = _on_disk(self._mesh).file_prefix(self._mesh.rank)
        for number, tensors in enumerate(_by_file(self._optimizer_copy)):
            path = target / f"{prefix}{number:05}.safetensors"
            write_tensors(path, tensors, torch.float32)
            failpoint("state.optimizer")
            _sync(path)
            yield path


def critic_state(critic: Policy, optimizer: AdamW, carry_from: Path) -> TrainingState:
    """The state of a critic, which has folders of its own in a snapshot."""
    return TrainingState(critic.model, optimizer, carry_from, critic.computing.mesh, OF_CRITIC)


def gather(master: Tensor, parameter: Tensor) -> Tensor:
    """The whole parameter, from the shards of all ranks (a collective)."""
    if not is_spread(parameter):
        return master
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(
        master,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return spread.full_tensor()


def _write_mesh(folder: Path, mesh: TrainerMesh) -> Path:
    path = folder / MESH_FILE
    path.write_bytes(msgspec.json.encode(_on_disk(mesh)))
    _sync(path)
    return path


def _on_disk(mesh: TrainerMesh) -> MeshOnDisk:
    return MeshOnDisk(mesh.shards, mesh.tensor, mesh.expert)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _by_file(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in order, grouped into files of a size that any file system takes."""
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > _FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return files
