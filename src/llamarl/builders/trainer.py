"""Builds one rank of the trainer: policy, loss, optimizer, and the writer of its weights."""

from __future__ import annotations

from llamarl.builders.compute import compute_settings
from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, gpu_for
from llamarl.builders.loss import make_loss
from llamarl.builders.weights import make_weight_writer
from llamarl.executors.executor import Executor
from llamarl.executors.trainer import Trainer
from llamarl.model.training_state import POLICY, keeps_policy_only
from llamarl.train.learner import Learner
from llamarl.train.mesh import make_mesh
from llamarl.train.policy import load_policy
from llamarl.train.reference import HostedReference
from llamarl.train.restore import load_masters, restore


def build_trainer(context: BuildContext) -> Executor:
    config = context.config
    folder = context.snapshot / POLICY if context.snapshot else config.model_folder
    device = device_of("trainer.device", config.trainer.device, gpu_for(context))
    settings = config.trainer
    mesh = make_mesh(settings.data, settings.tensor, context.rank, device, settings.replicate)
    computing = compute_settings(config, device, mesh)
    policy = load_policy(folder, computing)
    learner = Learner(
        policy, make_loss(config), settings=config.trainer, algo=config.algo, updates=config.schedule.updates
    )
    load_masters(policy.model, learner.optimizer, folder)
    if context.snapshot and not keeps_policy_only(context.snapshot):
        restore(policy.model, learner.optimizer, context.snapshot)
    hosted = config.algo.reference_kl > 0 and not config.reference_alone
    reference = HostedReference(load_policy(config.reference_folder, computing)) if hosted else None
    # Publishing beside training needs a process group of its own with several ranks; on a CPU it would only take cores.
    beside = config.engine.kind != "inline" and device.type == "cuda" and context.num_ranks == 1
    return Trainer(
        learner,
        make_weight_writer(context, policy),
        carry_from=config.model_folder,
        reference=reference,
        tell=context.tell_engine if beside else None,
        policy_only_at=config.schedule.updates if config.snapshots.at_end == "policy" else None,
    )
