"""`task`: where prompts and their answers come from."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class DatasetConfig(Section, frozen=True):
    """One source of problems, and how a problem becomes a prompt."""

    kind: Annotated[
        Literal["arithmetic", "gsm8k", "math", "svamp", "jsonl", "code", "mixture", "given"],
        Meta(description="source of the prompts; given: from Python, by Job(config, task=...)"),
    ] = "arithmetic"
    path: Annotated[str, Meta(description="data file, or folder with train.jsonl; nothing is downloaded")] = ""
    test_path: Annotated[
        str, Meta(description="file of the fixed test problems; empty: test.jsonl next to the training file, if any")
    ] = ""
    max_operand: Annotated[int, Meta(ge=9, le=999, description="arithmetic: largest operand")] = 99
    held_out: Annotated[
        float, Meta(gt=0, lt=1, description="share of the problems held out for evaluation, chosen by hash")
    ] = 0.1
    prompt_field: Annotated[
        str, Meta(min_length=1, description="jsonl: field with the prompt, a string or a list of {role, content}")
    ] = "prompt"
    answer_field: Annotated[str, Meta(min_length=1, description="jsonl: field with the answer")] = "answer"
    solution_field: Annotated[
        str, Meta(description="jsonl: field with a worked solution, shown in few-shot examples; empty: the answer")
    ] = ""
    template: Annotated[
        str, Meta(description="template of a prompt, with {prompt} in place of the problem; empty: suits the kind")
    ] = ""
    few_shot: Annotated[int, Meta(ge=0, le=64, description="solved examples before each problem")] = 0


class MixturePart(DatasetConfig, frozen=True):
    """One component of a mixture of datasets."""

    weight: Annotated[float, Meta(gt=0, description="share of the prompts, relative to the other parts")] = 1.0

    def __post_init__(self) -> None:
        if self.kind == "mixture":
            raise ConfigError("task.parts: a part of a mixture cannot be a mixture")
        if self.kind == "given":
            raise ConfigError("task.parts: a part of a mixture cannot be given from Python")
        _check_path("task.parts", self)


class TaskConfig(DatasetConfig, frozen=True):
    """The dataset of a job, or a mixture of several; see docs/tasks.md."""

    chat: Annotated[bool, Meta(description="send prompts as user messages in the model's chat template")] = False
    system: Annotated[str, Meta(description="chat: the system message; empty: none")] = ""
    parts: Annotated[
        tuple[MixturePart, ...], Meta(description="mixture: its datasets, each with kind, weight, path and so on")
    ] = ()

    def __post_init__(self) -> None:
        if (self.kind == "mixture") != bool(self.parts):
            raise ConfigError("task.parts: a mixture needs parts, and other kinds have none")
        if self.parts and (self.path or self.test_path or self.template or self.few_shot):
            raise ConfigError("task.path: a mixture's parts have paths, templates and examples of their own")
        _check_path("task.path", self)
        if self.system and not self.chat:
            raise ConfigError("task.system: cannot take effect without task.chat=true")


def _check_path(key: str, source: DatasetConfig) -> None:
    if source.kind == "arithmetic" and (source.path or source.test_path):
        raise ConfigError(
            f"{key}: arithmetic makes its own problems; to read a file, set the kind too, such as task=jsonl"
        )
