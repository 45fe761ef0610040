"""What an answer is worth: scorers, the sandbox for programs, models that judge."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, field

from llamarl.config.section import Device, Section, Threads
from llamarl.errors import ConfigError


class Reward(Section, frozen=True):
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


class Sandbox(Section, frozen=True):
    """Limits of one run of a program that the policy wrote; see docs/sandbox.md."""

    cpu_s: Annotated[
        float, Meta(gt=0, le=3600, description="processor time of each of its processes, in whole seconds")
    ] = 4.0
    wall_s: Annotated[float, Meta(gt=0, le=3600, description="a run that takes longer is ended")] = 8.0
    answer_s: Annotated[
        float, Meta(gt=0, le=36_000, description="for all tests of one answer; those it does not reach are failed")
    ] = 30.0
    memory_mb: Annotated[int, Meta(ge=48, description="address space of each of its processes")] = 256
    processes: Annotated[int, Meta(ge=1, le=1000, description="processes and threads it may have at once")] = 16
    file_mb: Annotated[int, Meta(ge=0, description="of all files together that it writes; they are gone with it")] = 16
    output_kb: Annotated[int, Meta(ge=1, le=1 << 16, description="output beyond this ends the run")] = 64
    python: Annotated[
        str, Meta(description="interpreter, with its installed packages; empty: this one, standard library alone")
    ] = ""

    @property
    def patience_s(self) -> float:
        """For one run, with putting up its walls and taking them down."""
        return self.wall_s + 3.0


class LLMJudge(Section, frozen=True):
    """The endpoint behind `reward.scorer: llm_judge`: anything that speaks OpenAI's chat completions."""

    url: Annotated[
        str, Meta(pattern=r"^https?://[^@?#\s]+$", description="where it is, up to and with /v1; no key in it")
    ] = "http://127.0.0.1:8000/v1"
    model: Annotated[str, Meta(description="the name of the model there")] = ""
    rubric: Annotated[str, Meta(description="file with the rubric, in plain words")] = ""
    key_env: Annotated[
        str, Meta(pattern=r"^\w*$", description="environment variable that holds the key; empty: none is sent")
    ] = ""
    top: Annotated[float, Meta(gt=0, le=1e6, description="the best score; rewards are its shares")] = 10.0
    timeout_s: Annotated[float, Meta(gt=0, le=3600, description="for one request")] = 60.0
    retries: Annotated[int, Meta(ge=0, le=10, description="of a request that met a busy or absent endpoint")] = 3
    max_tokens: Annotated[int, Meta(ge=1, description="that the judge may write")] = 1024
    max_chars: Annotated[int, Meta(ge=1, description="of an answer that the judge is shown")] = 50_000

    @property
    def patience_s(self) -> float:
        """For one answer, pauses between attempts included."""
        return (self.retries + 1) * self.timeout_s + 8.0 * self.retries


class RewardModel(Section, frozen=True):
    """A model on the line behind the scorer, whose score is added to the reward."""

    path: Annotated[
        str, Meta(description="its Hugging Face sequence-classification folder (one label); empty: no such role")
    ] = ""
    weight: Annotated[
        float, Meta(description="of its score in the reward; set reward.scorer=none to have it alone")
    ] = 1.0
    squash: Annotated[bool, Meta(description="its score through a sigmoid, so that it lies between 0 and 1")] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="auto: bfloat16 on a GPU, float32 elsewhere")
    ] = "auto"
    device: Device = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError("reward_model.weight: must be a finite number")
