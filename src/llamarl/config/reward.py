"""`reward`: how an answer is scored."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, field

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class RewardConfig(Section, frozen=True):
    scorer: Annotated[
        str,
        Meta(
            description="auto (what suits the task), exact, numeric, choice, regex, math, format, length, code, llm_judge, "
            "none (0 for everything), or FILE.py:FUNCTION called as score(completion, answer, prompt), or with the columns "
            "that its parameters name, or with all completions of a prompt; it may be async; see docs/tasks.md"
        ),
    ] = "auto"
    trusted: Annotated[
        bool,
        Meta(
            description="FILE.py: run it in the reward's own process, which is much faster, without limits of time and "
            "memory and without a process for every answer; an async one is still cancelled after timeout_s"
        ),
    ] = False
    concurrency: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="FILE.py, async: answers under way at once, in each worker; with trusted, in all",
        ),
    ] = 64
    combine: Annotated[
        dict[str, float], Meta(description="several scorers and their weights, summed, instead of one: {math: 1, ...}")
    ] = field(default_factory=dict)
    answer_from: Annotated[
        Literal["auto", "whole", "boxed", "hashes", "last_number"],
        Meta(
            description="numeric, math: the final answer is the whole text, in \\boxed{}, after ####, the last number"
        ),
    ] = "auto"
    pattern: Annotated[
        str, Meta(description="regex: must be found; where it has a group, its last match must be the answer")
    ] = ""
    format: Annotated[
        Literal["boxed", "hashes", "think"],
        Meta(description="format: one \\boxed{}, a last line with ####, or <think>...</think> before the answer"),
    ] = "boxed"
    max_chars: Annotated[
        int, Meta(ge=2, description="length: 1 for up to half as many characters, falling to 0 at this many")
    ] = 4000
    tests: Annotated[
        Literal["all", "share"], Meta(description="code: 1 for passing all tests, or the share of tests passed")
    ] = "all"
    workers: Annotated[
        int, Meta(ge=1, le=256, description="processes for scorers that can hang or are foreign (math, code, FILE.py)")
    ] = 2
    timeout_s: Annotated[float, Meta(gt=0, description="a worker that takes longer over one answer is killed")] = 2.0
    memory_mb: Annotated[
        int, Meta(ge=128, description="memory for judging one answer; FILE.py: beyond what the file itself loads")
    ] = 512
    retries: Annotated[
        int, Meta(ge=0, le=10, description="an answer that could not be judged is tried so often again")
    ] = 1
    max_failure_share: Annotated[
        float,
        Meta(ge=0, le=1, description="of the last 1,000 answers; beyond it the job stops, since its scorer is broken"),
    ] = 0.1

    def __post_init__(self) -> None:
        if not all(math.isfinite(weight) for weight in self.combine.values()):
            raise ConfigError("reward.combine: weights must be finite numbers")
        if self.combine and self.scorer != "auto":
            raise ConfigError("reward.scorer: cannot take effect beside reward.combine; put it in there with a weight")
        if not math.isfinite(self.timeout_s):
            raise ConfigError("reward.timeout_s: must be a finite number")
