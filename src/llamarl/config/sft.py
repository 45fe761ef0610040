"""`sft`: answers from data that the policy imitates."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section
from llamarl.config.task import DatasetConfig
from llamarl.errors import ConfigError


class SftConfig(Section, frozen=True):
    """Supervised fine-tuning: rows of data with answers, alone or beside rollouts; see docs/sft.md."""

    path: Annotated[
        str,
        Meta(
            description="data file, folder, pattern such as data/*.parquet, or a name on the hub, ORG/NAME[@REVISION]; "
            "empty: no rows"
        ),
    ] = ""
    config: Annotated[str, Meta(description="config (subset) of the dataset, if it has several")] = ""
    split: Annotated[str, Meta(min_length=1, description="split of path that is learned")] = "train"
    messages_field: Annotated[
        str, Meta(min_length=1, description="column with whole chats, a list of {role, content}")
    ] = "messages"
    prompt_field: Annotated[
        str, Meta(min_length=1, description="column with the prompt, text or messages, in data without chats")
    ] = "prompt"
    completion_field: Annotated[
        str, Meta(min_length=1, description="column with the answer, text or messages, in data without chats")
    ] = "completion"
    template: Annotated[
        str, Meta(description="template of prompts that are texts, with {prompt} in place of each, as in task.template")
    ] = "{prompt}"
    chat: Annotated[
        bool, Meta(description="put prompts and completions that are texts into the model's chat template")
    ] = False
    system: Annotated[str, Meta(description="system message of chats that have none; empty: none")] = ""
    learn: Annotated[
        Literal["assistant", "all"],
        Meta(description="tokens with a loss: those of the assistant with its end tokens, or all"),
    ] = "assistant"
    max_tokens: Annotated[int, Meta(ge=0, description="longest row; 0: as many as the model has positions")] = 0
    too_long: Annotated[
        Literal["skip", "cut", "refuse"],
        Meta(description="longer rows: leave them out and say how many, cut off their end, or do not start"),
    ] = "skip"
    epochs: Annotated[
        int,
        Meta(
            ge=0, description="share=1: passes over the rows, which give schedule.updates; 0: schedule.updates counts"
        ),
    ] = 1
    share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of an update's learned tokens that are rows'; 1: nothing is sampled but evaluations",
        ),
    ] = 1.0
    weight: Annotated[float, Meta(gt=0, description="weight of the rows' cross-entropy in the loss")] = 1.0

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise ConfigError("sft.template: must hold {prompt} where the prompt goes")
        if self.share < 1 and self.epochs > 1:
            raise ConfigError("sft.epochs: cannot take effect with sft.share below 1, where schedule.updates counts")

    def __bool__(self) -> bool:
        return bool(self.path)

    @property
    def source(self) -> DatasetConfig:
        """Where the rows lie, as tasks name it."""
        return DatasetConfig(kind="dataset", path=self.path, config=self.config, split=self.split)
