"""The line of a job that declares none: task -> generator -> reward -> trainer, and weights back."""

from __future__ import annotations

from llamarl.config import Config
from llamarl.controller.line import SOURCE, Channel, Line, Role

GROUPS_AHEAD = 4  # groups in the inbox of the reward, so that it need not wait for the next one
GENERATOR_AHEAD = 3  # capacity per slot: no slot should be empty while the longest answer of a group is written


def default_line(config: Config) -> Line:
    """A reward model and a reference policy stand between reward and trainer if the config asks for them."""
    samples = config.schedule.samples_per_group
    between, to_trainer = _way_to_trainer(config)
    return Line(
        [
            Role(
                name="generator",
                unit="group",
                done="generated",
                executors=config.generator.replicas,
                ranks=config.generator.tensor,
                capacity=GENERATOR_AHEAD * config.generator.slots + config.num_parked,
                at_once=config.generator.slots + config.num_parked,
                threads=config.generator.threads,
                gpu=True,
            ),
            Role(name="reward", unit="group", done="scored", capacity=GROUPS_AHEAD * samples, threads=1),
            Role(
                name="trainer",
                unit="batch",
                done="trained",
                ranks=config.trainer.ranks,
                threads=config.trainer.threads,
                gpu=True,
            ),
            *between,
        ],
        [
            Channel("prompts", "groups", SOURCE, "generator"),
            Channel("completions", "groups", "generator", "reward"),
            *to_trainer,
            Channel("weights", "weights", "trainer", "generator"),
        ],
    )


def _way_to_trainer(config: Config) -> tuple[list[Role], list[Channel]]:
    """The roles between reward and trainer, and the channels through them: a reward model, a reference policy with ranks of
    its own, both or neither."""
    roles: list[Role] = []
    if config.reward_model.path:
        ahead = GROUPS_AHEAD * config.schedule.samples_per_group
        threads = config.reward_model.threads
        roles.append(Role(name="reward_model", unit="group", done="ranked", capacity=ahead, threads=threads, gpu=True))
    if config.reference_alone:
        settings = config.reference
        roles.append(
            Role(
                name="reference",
                unit="batch",
                done="referenced",
                ranks=settings.ranks,
                threads=settings.threads,
                gpu=True,
            )
        )
    stops = ["reward", *(role.name for role in roles), "trainer"]
    names = ["rollouts", *(role.done for role in roles)]
    return roles, [Channel(names[at], "groups", stops[at], stops[at + 1]) for at in range(len(stops) - 1)]
