"""`algo`: the loss, advantages and what is left out of them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section


class AlgoConfig(Section, frozen=True):
    loss: Annotated[
        str,
        Meta(
            description="aipo, reinforce, rloo, ppo, grpo, cispo, gspo, or FILE.py:FUNCTION called as loss(tokens, algo)"
        ),
    ] = "aipo"
    advantage: Annotated[
        Literal["auto", "mean", "leave_one_out", "mean_std"],
        Meta(description="what a reward is held against: its group's mean ...; auto: what the loss was published with"),
    ] = "auto"
    rho: Annotated[float, Meta(gt=0, description="AIPO's upper clip of the importance weight; 2 to 10 works well")] = (
        4.0
    )
    clip_low: Annotated[float, Meta(ge=0, le=1, description="ppo, grpo: a ratio below 1 - this stops pulling")] = 0.2
    clip_high: Annotated[float, Meta(ge=0, description="ppo, grpo: a ratio above 1 + this stops pulling")] = 0.2
    cispo_high: Annotated[float, Meta(ge=0, description="cispo: the importance weight is cut at 1 + this")] = 4.0
    gspo_low: Annotated[float, Meta(ge=0, le=1, description="gspo: clip of a whole answer's ratio, downwards")] = 3e-4
    gspo_high: Annotated[float, Meta(ge=0, description="gspo: clip of a whole answer's ratio, upwards")] = 4e-4
    reference_kl: Annotated[
        float, Meta(ge=0, description="weight of the KL to the reference policy; above 0 puts a reference on the line")
    ] = 0.0
    entropy: Annotated[float, Meta(ge=0, description="weight of an entropy bonus")] = 0.0
    overlong: Annotated[
        Literal["keep", "mask", "penalize"],
        Meta(description="answers cut off at the token limit: keep, take out of the loss, or take from their reward"),
    ] = "keep"
    overlong_penalty: Annotated[
        float, Meta(ge=0, description="what overlong=penalize takes from the reward of an answer that was cut off")
    ] = 1.0
    zero_variance: Annotated[
        Literal["keep", "skip"],
        Meta(description="groups whose rewards are all equal: keep their tokens in the loss's denominator, or skip"),
    ] = "skip"
