"""`reward`: how an answer is scored."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, field

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class RewardConfig(Section, frozen=True):
    """The scorer of answers, its options and its limits; see docs/scorers.md."""

    scorer: Annotated[
        str,
        Meta(
            description="auto (suits the task), exact, numeric, choice, regex, math, format, length, code, llm_judge, "
            "reasoning_gym (the set's own), none (always 0), or FILE.py:FUNCTION called as score(completion, answer, prompt),"
            " with the columns its parameters name, or with all completions of a prompt; it may be async; see docs/scorers.md"
        ),
    ] = "auto"
    trusted: Annotated[
        bool,
        Meta(
            description="FILE.py: run it in the reward's own process: much faster, but without time and memory limits or a "
            "process per answer; an async scorer is still canceled after timeout_s"
        ),
    ] = False
    concurrency: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="FILE.py, async: answers scored at the same time, per worker; in total with trusted",
        ),
    ] = 64
    combine: Annotated[
        dict[str, float], Meta(description="weighted sum of several scorers instead of one: {math: 1, ...}")
    ] = field(default_factory=dict)
    answer_from: Annotated[
        Literal["auto", "whole", "boxed", "hashes", "last_number"],
        Meta(
            description="numeric, math, reasoning_gym: the final answer is the whole text, in \\boxed{}, after ####, or the "
            "last number"
        ),
    ] = "auto"
    pattern: Annotated[
        str, Meta(description="regex: pattern to be found; if it has a group, the last match must equal the answer")
    ] = ""
    format: Annotated[
        Literal["boxed", "hashes", "think"],
        Meta(description="format: required form: one \\boxed{}, a last line with ####, or <think>...</think> first"),
    ] = "boxed"
    max_chars: Annotated[
        int, Meta(ge=2, description="length: characters at which the score is 0; up to half as many score 1")
    ] = 4000
    tests: Annotated[
        Literal["all", "share"], Meta(description="code: score 1 if all tests pass, or the share of passed tests")
    ] = "all"
    workers: Annotated[
        int,
        Meta(ge=1, le=256, description="processes for scorers that may hang or are user code (math, code, FILE.py)"),
    ] = 2
    timeout_s: Annotated[
        float, Meta(gt=0, description="time limit for one answer, after which the worker is killed")
    ] = 2.0
    memory_mb: Annotated[
        int, Meta(ge=128, description="memory for scoring one answer; FILE.py: beyond what the file itself loads")
    ] = 512
    retries: Annotated[int, Meta(ge=0, le=10, description="retries for an answer whose scoring failed")] = 1
    max_failure_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="the job stops when more than this share of the last 1,000 answers could not be scored",
        ),
    ] = 0.1

    @property
    def scorers(self) -> frozenset[str]:
        """Names of the scorers that are asked for."""
        return frozenset(self.combine or [self.scorer])

    def __post_init__(self) -> None:
        if not all(math.isfinite(weight) for weight in self.combine.values()):
            raise ConfigError("reward.combine: weights must be finite numbers")
        if self.combine and self.scorer != "auto":
            raise ConfigError("reward.scorer: cannot take effect beside reward.combine; add it there with a weight")
        if not math.isfinite(self.timeout_s):
            raise ConfigError("reward.timeout_s: must be a finite number")
