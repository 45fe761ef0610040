"""Makes groups for tests from plain lists of tokens, log-probs and versions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from llamarl.types import (
    Completion,
    Problem,
    PromptGroup,
    Rollout,
    RolloutGroup,
    Sampling,
    VersionRun,
    floats_to_bytes,
    tokens_to_bytes,
)


def prompt_group(
    tokens: Sequence[int],
    *,
    ordinal: int = 0,
    samples: int = 1,
    max_new_tokens: int = 8,
    temperature: float = 1.0,
    top_k: float = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> PromptGroup:
    sampling = Sampling(
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=int(top_k),
        top_p=top_p,
        min_p=min_p,
    )
    return PromptGroup(ordinal, Problem("1+1=", "2"), tokens_to_bytes(tokens), sampling)


def completion(
    tokens: Sequence[int], logprobs: Sequence[float] | None = None, versions: Sequence[int] | None = None
) -> Completion:
    """A completion; `versions` has the version that sampled each token."""
    runs = groupby(versions if versions is not None else [0] * len(tokens))
    return Completion(
        tokens=tokens_to_bytes(tokens),
        behavior_logprobs=floats_to_bytes(logprobs if logprobs is not None else [-1.0] * len(tokens)),
        versions=tuple(VersionRun(version, len(list(run))) for version, run in runs),
        truncated=False,
    )


def rollout_group(
    prompt: Sequence[int], answers: Sequence[tuple[Completion, float]], *, ordinal: int = 0
) -> RolloutGroup:
    rollouts = tuple(Rollout(answer, reward) for answer, reward in answers)
    return RolloutGroup(prompt_group(prompt, ordinal=ordinal, samples=len(answers)), rollouts)
