"""Builds one rank of the trainer: policy, loss, optimizer, and the writer of its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from llamarl.algo.streams import StreamWeights
from llamarl.builders.base import load_base, trainer_has_base
from llamarl.builders.compute import compute_settings
from llamarl.builders.context import BuildContext
from llamarl.builders.critic import make_critic
from llamarl.builders.devices import device_of, gpu_for
from llamarl.builders.loss import make_loss
from llamarl.builders.teacher import hosted_teachers, sent_teachers
from llamarl.builders.weights import applied_types, make_weight_writer
from llamarl.config import Config
from llamarl.executors.executor import Executor
from llamarl.executors.trainer import Trainer
from llamarl.model.training_state import POLICY, keeps_policy_only
from llamarl.train.adapter_check import EffectTolerance
from llamarl.train.compiler import import_beside
from llamarl.train.learner import Learner
from llamarl.train.mesh import make_mesh
from llamarl.train.passes import UpdatePasses
from llamarl.train.policy import Policy, load_policy
from llamarl.train.reference import BaseReference, HostedReference
from llamarl.train.restore import load_masters, restore
from llamarl.train.routing import NARROW_ROUTES, QUANTIZED_ROUTES, RouteTolerance
from llamarl.train.warm_up import WarmUp

_MERGED_NARROW = 0.1  # share of the effect; a small model in bf16 lost 0.026 in its first update
_NARROW_INPUTS = 2e-3  # log-probs; one number that was rounded the other way to fp8 changed them by 4e-4
_ROUNDING = {
    torch.bfloat16: 0.03,
    torch.float16: 0.01,
}  # log-probs; twice what was seen: benchmarks/results/logprob_gap.md


def build_trainer(context: BuildContext) -> Executor:
    config = context.config
    device = device_of("trainer.device", config.trainer.device, gpu_for(context))
    settings = config.trainer
    mesh = make_mesh(
        settings.data, settings.tensor, context.rank, device, settings.replicate, settings.context, settings.expert
    )
    computing = replace(
        compute_settings(config, device, mesh),
        replay_routes=settings.replay_routes,
        balance_loss=settings.balance_loss,
    )
    if computing.compiled:
        import_beside()
    folder, adapter = _start_of(context)
    base = load_base(context, folder, device, computing.weight_dtype) if trainer_has_base(config) else None
    policy = load_policy(folder, computing, adapter=adapter, seed=config.seed, base=base)
    teachers, sent = hosted_teachers(config, policy), sent_teachers(config, policy)
    sampled_kl = config.teacher.kl == "sampled"
    learner = Learner(
        policy,
        make_loss(config),
        settings=config.trainer,
        algo=config.algo,
        updates=config.schedule.updates,
        tolerance=_tolerance(config, computing.dtype) if config.model.lora else None,
        weights=StreamWeights(
            imitation=config.sft.weight, sampled_kl=config.teacher.weight if config.teacher and sampled_kl else 0.0
        ),
        teachers=None if sampled_kl else sent or teachers,
        route_tolerance=_route_tolerance(config, computing.dtype),
        first_update=config.critic.head_start,
        passes=UpdatePasses(config.algo.epochs, config.algo.minibatches, config.seed),
    )
    load_masters(policy.model, learner.optimizer, folder)
    if context.snapshot and not keeps_policy_only(context.snapshot):
        restore(policy.model, learner.optimizer, context.snapshot)
    hosted = config.algo.reference_kl > 0 and not config.reference_alone
    reference = _hosted_reference(config, policy) if hosted else None
    # Publishing beside training needs a process group of its own with several ranks; on a CPU it would only take cores.
    beside = config.engine.kind != "inline" and device.type == "cuda" and context.num_ranks == 1 and config.samples
    return Trainer(
        learner,
        make_weight_writer(context, policy),
        carry_from=config.model_folder,
        reference=reference,
        teachers=teachers if sampled_kl else sent,
        critic=make_critic(context, computing) if config.has_critic and not config.critic_alone else None,
        critic_from=config.critic_folder,
        tell=context.tell_engine if beside else None,
        adapter_types=applied_types(config) if config.model.lora and config.samples else (),
        policy_only_at=config.schedule.updates if config.snapshots.at_end == "policy" else None,
        warm_up=_warm_up(config, learner) if computing.compiled and config.engine.kind != "inline" else None,
    )


def _warm_up(config: Config, learner: Learner) -> WarmUp:
    schedule, generator = config.schedule, config.generator
    probes = bool(schedule.probe_every and (schedule.max_staleness or config.agent))
    samples = schedule.samples_per_group if config.samples else 1
    return WarmUp(learner, generator.max_prompt_tokens, generator.max_new_tokens, probes, samples)


def _tolerance(config: Config, dtype: torch.dtype) -> EffectTolerance:
    """A decoder's arithmetic is another than that of a pass over the whole answer, with which both sides measure the base.
    Inputs rounded to fp8 jump. Merged weights are rounded, which loses a part of what the adapters add to them."""
    served = applied_types(config)[-1]
    least = max(_ROUNDING.get(one, 0.0) for one in (dtype, served)) or EffectTolerance().least
    if config.model.base == "fp8":
        least = max(least, _NARROW_INPUTS)
    merged = config.generator.lora == "merged" and served != torch.float32
    return EffectTolerance(share=_MERGED_NARROW if merged else 0.0, least=least)


def _route_tolerance(config: Config, dtype: torch.dtype) -> RouteTolerance:
    """Narrow numbers swap experts that are about equal; quantized ones also single ones that are not."""
    settings = config.generator
    if config.generator_quantize != "none" or settings.kv_cache == "fp8":
        return QUANTIZED_ROUTES
    narrow = dtype != torch.float32 or settings.dtype in ("bfloat16", "float16")
    return NARROW_ROUTES if narrow else RouteTolerance()


def _start_of(context: BuildContext) -> tuple[Path, Path | None]:
    """Folders of the model, and of its adapters if there are any to begin with."""
    config, saved = context.config, context.snapshot / POLICY if context.snapshot else None
    if not config.model.lora:
        return saved or config.model_folder, None
    return config.model_folder, saved or config.adapter_folder


def _hosted_reference(config: Config, policy: Policy) -> HostedReference | BaseReference:
    """The reference on the trainer's ranks. The base of a policy with adapters is one already."""
    if config.base_is_reference:
        return BaseReference(policy)
    return HostedReference(load_policy(config.reference_folder, policy.computing.of_another_model()))
