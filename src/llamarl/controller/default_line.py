"""The line of a job that brings none of its own: task -> generator -> reward -> trainer, and weights back."""

from __future__ import annotations

from llamarl.config import Config
from llamarl.controller.line import SOURCE, Channel, Line, Role

GROUPS_AHEAD = 4  # groups that may lie in the reward's inbox, so that it need not wait for the next


def default_line(config: Config) -> Line:
    """task -> generator -> reward -> trainer, and weights back; a reference policy before the trainer if one is needed."""
    samples = config.schedule.samples_per_group
    reference, to_trainer = _way_to_trainer(config)
    return Line(
        [
            Role(
                name="generator",
                unit="group",
                done="generated",
                executors=config.generator.replicas,
                ranks=config.generator.tensor,
                capacity=config.generator.slots,
                threads=config.generator.threads,
            ),
            Role(name="reward", unit="group", done="scored", capacity=GROUPS_AHEAD * samples, threads=1),
            Role(
                name="trainer",
                unit="batch",
                done="trained",
                ranks=config.trainer.ranks,
                threads=config.trainer.threads,
            ),
            *reference,
        ],
        [
            Channel("prompts", "scatter", SOURCE, "generator"),
            Channel("completions", "gather", "generator", "reward"),
            *to_trainer,
            Channel("weights", "weights", "trainer", "generator"),
        ],
    )


def _way_to_trainer(config: Config) -> tuple[list[Role], list[Channel]]:
    """Straight from the reward, or by way of a reference policy with ranks of its own."""
    if not config.reference_alone:
        return [], [Channel("rollouts", "scatter", "reward", "trainer")]
    settings = config.reference
    role = Role(name="reference", unit="batch", done="referenced", ranks=settings.ranks, threads=settings.threads)
    return [role], [
        Channel("rollouts", "scatter", "reward", "reference"),
        Channel("referenced", "scatter", "reference", "trainer"),
    ]
