"""Builds the critic, on the trainer's ranks or on ranks of its own, and checks it before anything starts."""

from __future__ import annotations

from llamarl.algo.losses import reinforce_loss
from llamarl.algo.streams import StreamWeights
from llamarl.builders.compute import check_ranks, compute_settings
from llamarl.builders.context import BuildContext
from llamarl.builders.devices import device_of, gpu_for
from llamarl.builders.tokens import check_same_tokens
from llamarl.config import Config
from llamarl.errors import ConfigError, ModelError
from llamarl.executors.critic import CriticExecutor
from llamarl.executors.executor import Executor
from llamarl.layout.model import check_shared
from llamarl.model.classifier import open_value_model
from llamarl.model.hf_config import read_shape
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.training_state import CRITIC, OF_CRITIC, keeps_policy_only
from llamarl.train.critic import Critic
from llamarl.train.learner import Learner
from llamarl.train.mesh import make_mesh
from llamarl.train.passes import UpdatePasses
from llamarl.train.policy import ComputeSettings, load_value_policy
from llamarl.train.restore import load_masters, restore


def build_critic(context: BuildContext) -> Executor:
    """One rank of a critic that has ranks of its own."""
    config, settings = context.config, context.config.critic
    device = device_of("critic.device", settings.device, gpu_for(context))
    mesh = make_mesh(settings.data, settings.tensor, context.rank, device)
    critic = make_critic(context, compute_settings(config, device, mesh))
    policy_only_at = config.schedule.updates if config.snapshots.at_end == "policy" else None
    return CriticExecutor(critic, carry_from=config.critic_folder, policy_only_at=policy_only_at)


def make_critic(context: BuildContext, computing: ComputeSettings) -> Critic:
    """The critic on ranks that compute like this, at the snapshot that the job goes on from."""
    config, settings, algo = context.config, context.config.critic, context.config.algo
    snapshot = context.snapshot if context.snapshot and not keeps_policy_only(context.snapshot) else None
    folder = snapshot / CRITIC if snapshot else config.critic_folder
    policy = load_value_policy(folder, computing.of_another_model())
    learner = Learner(
        policy,
        reinforce_loss,  # takes no effect: a critic's documents are in no policy stream
        settings=config.critic_trainer,
        algo=algo,
        updates=config.schedule.updates,
        weights=StreamWeights(value_clip=settings.clip),
        passes=UpdatePasses(settings.epochs or algo.epochs, settings.minibatches or algo.minibatches, config.seed),
    )
    load_masters(policy.model, learner.optimizer, folder, open_value_model)
    if snapshot:
        restore(policy.model, learner.optimizer, snapshot, OF_CRITIC)
    next_update = int(context.snapshot.name) if context.snapshot else 0
    return Critic(learner, algo, target_lambda=settings.gae_lambda, next_update=next_update)


def check_critic(config: Config, spoken: Tokenizer) -> None:
    """Refuses a critic that cannot be read, or that reads other tokens than the policy's."""
    if not config.has_critic:
        return
    folder, key = config.critic_folder, "critic.path"
    try:
        shape = open_value_model(folder).shape
        own = Tokenizer.load(folder)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from None
    check_same_tokens(key, "critic", own, spoken)
    policy = read_shape(config.model_folder)
    if shape.vocab_size < spoken.vocab_size:
        raise ConfigError(
            f"{key}: its embedding has {shape.vocab_size} rows, and the policy's tokenizer {spoken.vocab_size} tokens; it "
            "must read them all"
        )
    if shape.max_positions < policy.max_positions:
        longest = config.generator.max_prompt_tokens + config.generator.max_new_tokens
        if shape.max_positions < longest:
            raise ConfigError(f"{key}: it has {shape.max_positions} positions, and answers may end at {longest}")
    if config.critic_alone:
        check_ranks("critic", config.critic, shape, config)
    else:
        check_shared(shape, config.trainer.tensor, config.trainer.expert, "trainer")
