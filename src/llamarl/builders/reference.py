"""Builds one rank of a reference that has ranks of its own."""

from __future__ import annotations

from llamarl.builders.base import load_base
from llamarl.builders.compute import compute_settings
from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, gpu_for
from llamarl.executors.executor import Executor
from llamarl.executors.reference import Reference
from llamarl.train.mesh import make_mesh
from llamarl.train.policy import load_policy


def build_reference(context: BuildContext) -> Executor:
    config = context.config
    device = device_of("reference.device", config.reference.device, gpu_for(context))
    mesh = make_mesh(config.reference.data, config.reference.tensor, context.rank, device)
    computing = compute_settings(config, device, mesh).of_another_model()
    folder = config.reference_folder
    shared = config.model.lora and mesh.size == 1 and folder == config.model_folder
    base = load_base(context, folder, device, computing.weight_dtype) if shared else None
    return Reference(load_policy(folder, computing, base=base))
