"""`schedule`: updates, groups, staleness, restarts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class ScheduleConfig(Section, frozen=True):
    """Length of the run, size of a batch, staleness, and when to give up; see docs/flow.md."""

    updates: Annotated[
        int,
        Meta(
            ge=1,
            description="updates, each of which makes the next policy version: one optimizer step, unless algo.minibatches "
            "or algo.epochs say more",
        ),
    ] = 180
    groups_per_update: Annotated[int, Meta(ge=1, description="P: prompts per update")] = 96
    samples_per_group: Annotated[
        int, Meta(ge=1, description="n: completions per prompt; 1 is for a critic or a teacher alone")
    ] = 8
    max_staleness: Annotated[
        int,
        Meta(ge=0, description="S: versions a trained group may lag behind (window=1); 0: synchronous and on-policy"),
    ] = 1
    window: Annotated[
        int, Meta(ge=1, description="W: at most W-1 younger groups may be trained before the oldest; 1: in order")
    ] = 1
    deterministic: Annotated[
        bool,
        Meta(description="same seed, same bytes, also when asynchronous: batch u is sampled by version u - S only"),
    ] = False
    dynamic_sampling: Annotated[
        int,
        Meta(
            ge=0,
            description="groups per update that may be replaced because all their rewards are equal; 0: none; see "
            "docs/difficulty.md",
        ),
    ] = 0
    max_restarts: Annotated[
        int, Meta(ge=0, description="consecutive restarts of one executor without any work done before the job stops")
    ] = 3
    max_attempts: Annotated[
        int, Meta(ge=1, description="executor deaths while working on a group before that group is dropped")
    ] = 3
    probe_every: Annotated[
        int,
        Meta(
            ge=0,
            description="updates between probes, which compare the generator's log-probs with the trainer's; 0: none",
        ),
    ] = 50
    max_skipped: Annotated[
        int, Meta(ge=1, description="consecutive updates with a non-finite loss or gradient before the job stops")
    ] = 5

    def __post_init__(self) -> None:
        if self.window > self.num_places:
            raise ConfigError(
                f"schedule.window: {self.window} cannot take effect, since at most (max_staleness + 1) * "
                f"groups_per_update = {self.num_places} groups are under way"
            )
        if self.deterministic and self.window > 1:
            raise ConfigError(
                f"schedule.window: {self.window} lets timing choose the batches, which schedule.deterministic rules out; "
                "set it to 1"
            )
        if self.deterministic and self.dynamic_sampling and self.max_staleness > 1:
            raise ConfigError(
                f"schedule.dynamic_sampling: with schedule.deterministic, max_staleness={self.max_staleness} is too much, "
                "since a snapshot would wait for versions that are not made yet; set it to 0 or 1"
            )

    @property
    def num_groups(self) -> int:
        """Groups in all batches; those that `dynamic_sampling` replaces come on top."""
        return self.updates * self.groups_per_update

    @property
    def answers_per_update(self) -> int:
        return self.groups_per_update * self.samples_per_group

    @property
    def num_places(self) -> int:
        """Groups that may be admitted and not yet retired."""
        return (self.max_staleness + 1) * self.groups_per_update

    def sampling_version(self, ordinal: int) -> int:
        """Version that samples this group in deterministic mode, where no group was replaced."""
        return max(0, ordinal // self.groups_per_update - self.max_staleness)

    @property
    def staleness_bound(self) -> int:
        """Largest possible distance between the version being trained and the one that sampled a group's first token."""
        return (self.num_places + self.window - 2) // self.groups_per_update
