"""`algo`: the loss, the advantages, and which answers take part in them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section


class AlgoConfig(Section, frozen=True):
    """The loss, its coefficients and how advantages are computed; see docs/trainer.md."""

    loss: Annotated[
        str,
        Meta(
            description="aipo, reinforce, rloo, ppo, grpo, cispo, gspo, or FILE.py:FUNCTION called as loss(tokens, algo)"
        ),
    ] = "aipo"
    advantage: Annotated[
        Literal["auto", "mean", "leave_one_out", "mean_std", "gae"],
        Meta(
            description="baseline and scale of the rewards in a group: mean, mean of the others, or mean and standard "
            "deviation; auto: as published with the loss; gae: an advantage for each token, from a critic"
        ),
    ] = "auto"
    gamma: Annotated[float, Meta(ge=0, le=1, description="gae: discount of what comes a token later")] = 1.0
    gae_lambda: Annotated[
        float,
        Meta(
            ge=0, le=1, description="gae: lambda of the policy's advantages; 1: whole returns, 0: the next value only"
        ),
    ] = 0.95
    whiten: Annotated[
        bool,
        Meta(description="gae: bring the advantages of each batch to mean 0 and deviation 1; equal ones are left at 0"),
    ] = True
    reward_weight: Annotated[
        float,
        Meta(
            ge=0, description="weight of the advantages that rewards give; 0: learn from a teacher or from data alone"
        ),
    ] = 1.0
    rho: Annotated[float, Meta(gt=0, description="aipo: upper clip of the importance weight; 2 to 10 works well")] = 4.0
    clip_low: Annotated[float, Meta(ge=0, le=1, description="ppo, grpo: the ratio is clipped below 1 - clip_low")] = 0.2
    clip_high: Annotated[float, Meta(ge=0, description="ppo, grpo: the ratio is clipped above 1 + clip_high")] = 0.2
    cispo_high: Annotated[
        float, Meta(ge=0, description="cispo: the importance weight is clipped above 1 + cispo_high")
    ] = 4.0
    gspo_low: Annotated[
        float, Meta(ge=0, le=1, description="gspo: the ratio of a whole answer is clipped below 1 - gspo_low")
    ] = 3e-4
    gspo_high: Annotated[
        float, Meta(ge=0, description="gspo: the ratio of a whole answer is clipped above 1 + gspo_high")
    ] = 4e-4
    epochs: Annotated[
        int, Meta(ge=1, description="passes over each batch; several are for losses that clip the ratio, such as ppo")
    ] = 1
    minibatches: Annotated[
        int, Meta(ge=1, description="optimizer steps in each pass, with equal parts of the batch's answers")
    ] = 1
    reference_kl: Annotated[
        float, Meta(ge=0, description="coefficient of the KL to the reference policy; above 0 adds a reference role")
    ] = 0.0
    entropy: Annotated[float, Meta(ge=0, description="coefficient of the entropy bonus")] = 0.0
    overlong: Annotated[
        Literal["keep", "mask", "penalize"],
        Meta(
            description="answers cut off at the token limit: keep them, mask them out of the loss, or penalize their reward"
        ),
    ] = "keep"
    overlong_penalty: Annotated[
        float, Meta(ge=0, description="amount that overlong=penalize subtracts from the reward of a cut-off answer")
    ] = 1.0
    zero_variance: Annotated[
        Literal["keep", "skip"],
        Meta(
            description="groups whose rewards are all equal: keep their tokens in the loss's denominator, or skip them"
        ),
    ] = "skip"

    @property
    def cut_off_penalty(self) -> float:
        """What is taken off the reward of an answer that was cut off."""
        return self.overlong_penalty if self.overlong == "penalize" else 0.0
