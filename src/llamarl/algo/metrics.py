"""Metrics of an update: its rollouts, and the distance of its tokens from the policy that is trained on them.

Token metrics are made from totals, so that ranks add theirs up before anything is divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llamarl.algo.losses import kl_estimate
from llamarl.algo.streams import StreamCounts
from llamarl.types import Completion, RolloutGroup, bytes_to_floats, has_same_rewards


@dataclass(frozen=True)
class TokenMeasures:
    """Measurements of every trained token, one entry each, without gradients."""

    policy_logprobs_N: Tensor
    behavior_logprobs_N: Tensor
    entropy_N: Tensor
    staleness_N: Tensor
    fresh_N: Tensor  # whether the version being trained sampled the whole completion


@torch.no_grad()
def token_totals(tokens: TokenMeasures, *, rho: float, staleness: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Sums by name, and the largest ratio. `staleness` lists the values that occur in the update."""
    log_ratio_N = (tokens.policy_logprobs_N - tokens.behavior_logprobs_N).double()
    ratio_N, kl_N = log_ratio_N.exp(), kl_estimate(log_ratio_N)
    weight_N = ratio_N.clamp(max=rho)
    sums = {
        "tokens": torch.ones_like(ratio_N).sum(),
        "ratio": ratio_N.sum(),
        "weight": weight_N.sum(),
        "squared_weight": (weight_N**2).sum(),
        "entropy": tokens.entropy_N.double().sum(),
        "kl": kl_N.sum(),
        "fresh_tokens": tokens.fresh_N.sum().double(),
        "fresh_gap": (log_ratio_N.abs() * tokens.fresh_N).sum(),
    }
    for value in staleness:
        here_N = tokens.staleness_N == value
        sums |= {f"tokens_s{value}": here_N.sum().double(), f"kl_s{value}": (kl_N * here_N).sum()}
    return sums, ratio_N.max() if len(ratio_N) else torch.zeros_like(sums["ratio"])


def token_metrics(sums: Mapping[str, float], ratio_max: float, staleness: Sequence[int]) -> dict[str, float]:
    """Metrics from the totals of all ranks. The effective sample size is a share: 1 is on-policy."""
    tokens = sums["tokens"]
    metrics = {
        "trained_tokens": tokens,
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": ratio_max,
        "effective_sample_size": sums["weight"] ** 2 / sums["squared_weight"] / tokens if sums["weight"] else 0.0,
        "entropy": sums["entropy"] / tokens,
        "kl_behavior": sums["kl"] / tokens,
        "staleness_mean": sum(value * sums[f"tokens_s{value}"] for value in staleness) / tokens,
        "staleness_max": float(max(staleness)),
    }
    for value in staleness:
        metrics[f"staleness_share_{value}"] = sums[f"tokens_s{value}"] / tokens
        metrics[f"kl_behavior_s{value}"] = sums[f"kl_s{value}"] / sums[f"tokens_s{value}"]
    if sums["fresh_tokens"]:
        metrics["logprob_gap"] = sums["fresh_gap"] / sums["fresh_tokens"]
    return metrics


def stream_metrics(sums: Mapping[str, float], counts: StreamCounts) -> dict[str, float]:
    """Metrics of the streams beside the policy gradient, where an update has any."""
    metrics: dict[str, float] = {}
    if counts.imitation or counts.teacher:
        metrics["trained_tokens"] = float(counts.total)
    if counts.imitation:
        metrics["sft_tokens"] = float(counts.imitation)
        metrics["sft_share"] = counts.imitation / counts.total
        metrics["sft_loss"] = sums["sft_loss"] / counts.imitation
    if counts.teacher:
        metrics["teacher_tokens"] = float(counts.teacher)
        metrics["teacher_kl"] = sums["teacher_kl"] / counts.teacher
    return metrics


def describe_groups(groups: Sequence[RolloutGroup], cut_off_penalty: float = 0.0) -> dict[str, float]:
    """Figures of the groups that were sampled; rows of data are only counted. `cut_off_penalty` is what the update takes off
    the reward of answers that were cut off."""
    rows = sum(group.prompt.written is not None for group in groups)
    if rows:
        sampled = describe_groups([one for one in groups if one.prompt.written is None], cut_off_penalty)
        return {**sampled, "groups": float(len(groups)), "sft_rows": float(rows)}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {"groups": 0.0, "completions": 0.0}
    lengths = [rollout.completion.num_tokens for rollout in rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "groups": float(len(groups)),
        "completions": float(len(rewards)),
        "reward": sum(rewards) / len(rewards),
        "zero_variance_share": sum(_is_flat(group, cut_off_penalty) for group in groups) / len(groups),
        "answer_tokens": sum(lengths) / len(lengths),
        "truncated_share": sum(rollout.completion.truncated for rollout in rollouts) / len(rollouts),
        "sampled_logprob": _mean_logprob([rollout.completion for rollout in rollouts]),
        **_describe_turns([rollout.completion for rollout in rollouts]),
        **({"branches": len(rollouts) / len(rewards)} if rollouts[0].completion.sample is not None else {}),
    }


def _is_flat(group: RolloutGroup, cut_off_penalty: float) -> bool:
    """Whether several answers got the same reward; a single one has nothing to differ from."""
    return len(group.rewards) > 1 and has_same_rewards(group, cut_off_penalty)


def _mean_logprob(completions: Sequence[Completion]) -> float:
    """Of a sampled token, under the policy that sampled it, also where nothing is trained: near 0, it is sure of each."""
    logprobs = bytes_to_floats(b"".join(completion.behavior_logprobs for completion in completions))
    return float(logprobs.mean(dtype=np.float64)) if len(logprobs) else 0.0


def _describe_turns(completions: Sequence[Completion]) -> dict[str, float]:
    """For conversations only: the model's turns, and the tokens of tools in between."""
    if not any(completion.given for completion in completions):
        return {}
    given = [sum(reply.count for reply in completion.given) for completion in completions]
    turns = [len(completion.given) + 1 for completion in completions]
    return {"turns": sum(turns) / len(turns), "given_tokens": sum(given) / len(given)}
