"""Rollouts as plain JSON values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarl.runs.rollouts import KeptGroup, KeptRollout


def rollout_row(group: KeptGroup, rollout: KeptRollout, *, tokens: bool = False) -> dict[str, Any]:
    """One rollout with its prompt. `tokens` adds a value for each token: ids, versions and log-probs; null: there is none."""
    row: dict[str, Any] = {
        "update": group.update,
        "group": group.ordinal,
        "number": rollout.number,
        "prompt": group.prompt,
        "expected": group.answer,
        "text": rollout.text,
        "turns": [{"role": turn.role, "text": turn.text} for turn in rollout.turns],
        "reward": _number(rollout.reward),
        "parts": dict(rollout.parts),
        "answer": rollout.given,
        "advantage": rollout.advantage,
        "status": rollout.status,
        "reason": rollout.reason,
        "num_tokens": int(rollout.sampled.sum()),
        "truncated": rollout.truncated,
    }
    if rollout.sample is not None:  # written through an agent
        row |= {"sample": rollout.sample, "player": rollout.player}
    if tokens:
        row |= {
            "prompt_tokens": group.prompt_tokens.tolist(),
            "tokens": rollout.tokens.tolist(),
            "sampled": rollout.sampled.tolist(),
            "versions": rollout.versions.tolist(),
            "behavior_logprobs": _numbers(rollout.behavior_logprobs),
            "policy_logprobs": _numbers(rollout.policy_logprobs),
            "columns": {name: _numbers(values) for name, values in rollout.columns.items()},
        }
    return row


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(values: NDArray[np.float32]) -> list[float | None]:
    return [_number(value) for value in values.tolist()]
