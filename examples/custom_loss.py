"""A loss of your own: a function from the tokens of an update to a number and its metrics. From the command line:

    llamarl train examples/custom_loss.yaml

or from Python, `python examples/custom_loss.py`, which does the same. Both find this file by the line
`loss: examples/custom_loss.py:ppo_clip` in the YAML, so start them where that path leads.

The one below is PPO's clip: a token that has moved further than EPSILON from what sampled it stops pulling. AIPO, the
default, keeps pulling with a capped weight instead; run both and compare the rewards in metrics.jsonl.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl import Job
from llamarl.algo.batch import TokenBatch
from llamarl.algo.losses import tokenwise
from llamarl.config import AlgoConfig

EPSILON = 0.2


@tokenwise
def ppo_clip(tokens: TokenBatch, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor | float]]:
    """`tokens` has one entry per completion token: how likely it is under the policy being trained
    (`policy_logprobs_N`, which carries the gradient), how likely it was when it was sampled (`behavior_logprobs_N`), and
    how much better than its group its completion was (`advantages_N`). `algo` is that section of the config.

    Divide by `tokens.num_tokens`, the count of the whole update, so that the loss does not depend on how it is cut up.
    It is cut: into parts of whole answers, or, for a loss that says `@tokenwise` because no token's term depends on
    another token, anywhere, which is faster.

    Metrics are averaged over the tokens of the update, or, if their name ends in `_max`, the largest counts. What every
    loss needs (ratios, entropy, KL, staleness) is measured anyway.
    """
    ratio_N = (tokens.policy_logprobs_N - tokens.behavior_logprobs_N).exp()
    clipped_N = ratio_N.clamp(1 - EPSILON, 1 + EPSILON)
    gain_N = torch.minimum(ratio_N * tokens.advantages_N, clipped_N * tokens.advantages_N)
    loss = -gain_N.sum() / tokens.num_tokens
    return loss, {"moved_share": (ratio_N != clipped_N).float().mean()}


if __name__ == "__main__":
    summary = Job.load("examples/custom_loss.yaml").run()
    print(f"held-out accuracy {summary.eval_before} -> {summary.eval_after} after {summary.updates} updates")
