"""`critic`: a model that learns what answers are worth, token by token."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import OwnRanks


class CriticConfig(OwnRanks, frozen=True):
    """The value model of `algo.advantage: gae`: what it begins from, how it learns, and where it computes; see
    docs/critic.md."""

    path: Annotated[
        str,
        Meta(
            description="model folder that it begins from: a language model, whose head is replaced by one row of zeros, or "
            "a sequence classifier with one label; empty: a copy of the policy at model.path"
        ),
    ] = ""
    lr: Annotated[
        float, Meta(gt=0, le=1, description="its own learning rate; warm-up and decline are those of trainer.lr")
    ] = 2e-4
    clip: Annotated[
        float, Meta(ge=0, description="most that an update should move a value; 0: values are not clipped")
    ] = 0.2
    gae_lambda: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="lambda of its targets: 1 is the whole return, lower values trust its own later values more",
        ),
    ] = 1.0
    head_start: Annotated[
        int, Meta(ge=0, description="updates in which only the critic learns, before the policy begins to move")
    ] = 0
    epochs: Annotated[int, Meta(ge=0, description="passes over each batch; 0: as many as algo.epochs")] = 0
    minibatches: Annotated[
        int, Meta(ge=0, description="optimizer steps in each pass; 0: as many as algo.minibatches")
    ] = 0
    place: Annotated[
        Literal["trainer", "own"],
        Meta(description="on the trainer's ranks, before each of its updates, or on ranks of its own, beside them"),
    ] = "trainer"
