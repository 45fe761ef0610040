"""`task`: where prompts and their answers come from."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class DatasetConfig(Section, frozen=True):
    """One source of problems, and how a problem becomes a prompt."""

    kind: Annotated[
        Literal[
            "arithmetic",
            "gsm8k",
            "math",
            "svamp",
            "dataset",
            "jsonl",
            "code",
            "reasoning_gym",
            "verifiers",
            "mixture",
            "given",
        ],
        Meta(
            description="source of the prompts; dataset: any, earlier called jsonl; given: from Python, by "
            "Job(config, task=...)"
        ),
    ] = "arithmetic"
    path: Annotated[
        str,
        Meta(
            description="data file, folder, pattern such as data/*.parquet, or a name on the hub, ORG/NAME[@REVISION]; "
            "empty: gsm8k, math and svamp by their names on the hub"
        ),
    ] = ""
    test_path: Annotated[
        str,
        Meta(description="the same for the fixed test problems; empty: test_split of path, or test.* next to its file"),
    ] = ""
    config: Annotated[str, Meta(description="config (subset) of the dataset, if it has several; see docs/hub.md")] = ""
    split: Annotated[str, Meta(min_length=1, description="split of path that is trained on")] = "train"
    test_split: Annotated[str, Meta(min_length=1, description="split with the fixed test problems, if any")] = "test"
    max_operand: Annotated[int, Meta(ge=9, le=999, description="arithmetic: largest operand")] = 99
    datasets: Annotated[
        dict[str, float],
        Meta(
            description="reasoning_gym: its sets and their shares of the prompts, such as {chain_sum: 1, countdown: 2}"
        ),
    ] = field(default_factory=dict)
    options: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="reasoning_gym: options of its sets, such as {chain_sum: {max_terms: 3}}; they set the difficulty"
        ),
    ] = field(default_factory=dict)
    size: Annotated[
        int,
        Meta(
            ge=10,
            le=10**9,
            description="reasoning_gym: number of problems of each set; verifiers: most tasks that are read",
        ),
    ] = 10_000
    env: Annotated[str, Meta(description="verifiers: id of the taskset or environment; see docs/environments.md")] = ""
    env_config: Annotated[
        dict[str, Any],
        Meta(description="verifiers: its settings, such as {agent: {max_turns: 4}}"),
    ] = field(default_factory=dict)
    env_python: Annotated[
        str, Meta(description="verifiers: Python of its virtual environment; `llamarl env install` makes one")
    ] = ""
    held_out: Annotated[
        float, Meta(gt=0, lt=1, description="share of the problems held out for evaluation, chosen by hash")
    ] = 0.1
    prompt_field: Annotated[
        str,
        Meta(min_length=1, description="dataset: column with the prompt, text or messages [{role, content}]"),
    ] = "prompt"
    answer_field: Annotated[
        str, Meta(min_length=1, description="dataset: column with the answer; column.key: inside of it")
    ] = "answer"
    solution_field: Annotated[
        str, Meta(description="dataset: column with a worked solution, shown in few-shot examples; empty: the answer")
    ] = ""
    min_chars: Annotated[int, Meta(ge=0, description="leave out problems with fewer characters")] = 0
    max_chars: Annotated[int, Meta(ge=0, description="leave out problems with more characters; 0: no limit")] = 0
    template: Annotated[
        str, Meta(description="template of a prompt, with {prompt} in place of the problem; empty: suits the kind")
    ] = ""
    few_shot: Annotated[int, Meta(ge=0, le=64, description="solved examples before each problem")] = 0
    teacher: Annotated[
        str,
        Meta(description="name in teacher.by_name of the teacher of these problems; empty: none, or teacher.column"),
    ] = ""


class MixturePart(DatasetConfig, frozen=True):
    """One component of a mixture of datasets."""

    weight: Annotated[float, Meta(gt=0, description="share of the prompts, relative to the other parts")] = 1.0

    def __post_init__(self) -> None:
        if self.kind == "mixture":
            raise ConfigError("task.parts: a part of a mixture cannot be a mixture")
        if self.kind == "given":
            raise ConfigError("task.parts: a part of a mixture cannot be given from Python")
        if self.kind == "verifiers":
            raise ConfigError("task.parts: a part of a mixture cannot be an environment of verifiers")
        _check_path("task.parts", self)


class TaskConfig(DatasetConfig, frozen=True):
    """The dataset of a job, or a mixture of several; see docs/tasks.md."""

    chat: Annotated[bool, Meta(description="send prompts as user messages in the model's chat template")] = False
    system: Annotated[str, Meta(description="chat: the system message; empty: none")] = ""
    chat_options: Annotated[
        dict[str, bool | int | float | str],
        Meta(description="chat: options of the model's chat template, such as {enable_thinking: false}"),
    ] = field(default_factory=dict)
    curriculum: Annotated[
        bool,
        Meta(
            description="ask problems by success rate: solved ones less often, too hard ones later; see docs/difficulty.md"
        ),
    ] = False
    solved_from: Annotated[
        float, Meta(description="curriculum: mean reward of a group from which its problem counts as solved")
    ] = 1.0
    hard_up_to: Annotated[
        float, Meta(description="curriculum: mean reward of a group up to which its problem counts as too hard")
    ] = 0.0
    parts: Annotated[
        tuple[MixturePart, ...], Meta(description="mixture: its datasets, each with kind, weight, path and so on")
    ] = ()

    def __post_init__(self) -> None:
        if (self.kind == "mixture") != bool(self.parts):
            raise ConfigError("task.parts: a mixture needs parts, and other kinds have none")
        if self.parts and (self.path or self.test_path or self.template or self.few_shot):
            raise ConfigError("task.path: a mixture's parts have paths, templates and examples of their own")
        if self.parts and (self.config or self.min_chars or self.max_chars):
            raise ConfigError("task.parts: config, min_chars and max_chars are set in each part of a mixture")
        _check_path("task.path", self)
        if not self.hard_up_to < self.solved_from:
            raise ConfigError(f"task.solved_from: must be above task.hard_up_to={self.hard_up_to:g}")
        if self.system and not self.chat:
            raise ConfigError("task.system: cannot take effect without task.chat=true")


def _check_path(key: str, source: DatasetConfig) -> None:
    section = key.removesuffix(".path")
    if (source.kind == "reasoning_gym") != bool(source.datasets):
        raise ConfigError(
            f"{section}.datasets: name sets of reasoning-gym with their weights for kind reasoning_gym, and for no other"
        )
    if source.datasets and (source.path or source.test_path or source.few_shot or source.min_chars or source.max_chars):
        raise ConfigError(
            f"{key}: reasoning_gym makes its own problems; path, few_shot, min_chars, max_chars cannot apply"
        )
    if not all(weight > 0 and math.isfinite(weight) for weight in source.datasets.values()):
        raise ConfigError(f"{section}.datasets: weights must be above 0")
    if unknown := sorted(source.options.keys() - source.datasets.keys()):
        raise ConfigError(f"{section}.options: '{unknown[0]}' is none of the sets in {section}.datasets")
    if (source.kind == "verifiers") != bool(source.env) or bool(source.env) != bool(source.env_python):
        raise ConfigError(f"{section}.env: kind verifiers needs env and env_python, and other kinds have neither")
    if source.env_config and not source.env:
        raise ConfigError(f"{section}.env_config: cannot take effect without {section}.env")
    if source.env and (source.path or source.test_path or source.few_shot or source.template):
        raise ConfigError(f"{key}: verifiers has its own tasks; path, few_shot and template cannot apply")
    if source.kind == "arithmetic" and (source.path or source.test_path):
        raise ConfigError(
            f"{key}: arithmetic makes its own problems; to read data, set the kind too, such as task=dataset"
        )
    if source.max_chars and source.max_chars < source.min_chars:
        raise ConfigError(f"{section}.max_chars: is below min_chars={source.min_chars}")
