"""What is asked, and of whom: the model, the task, and the tools it may talk to."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class Model(Section, frozen=True):
    path: Annotated[
        str, Meta(description="folder with config.json, *.safetensors and tokenizer.json; 'tiny' is the shipped model")
    ] = "tiny"


class Source(Section, frozen=True):
    """Where problems come from, and how a problem becomes a prompt."""

    kind: Annotated[
        Literal["arithmetic", "gsm8k", "math", "svamp", "jsonl", "code", "mixture", "given"],
        Meta(description="where prompts come from; given: from Python, by Job(config, task=...)"),
    ] = "arithmetic"
    path: Annotated[str, Meta(description="data file, or folder with train.jsonl; nothing is ever downloaded")] = ""
    test_path: Annotated[
        str, Meta(description="file of the fixed test problems; empty: test.jsonl beside the training file, if any")
    ] = ""
    max_operand: Annotated[int, Meta(ge=9, le=999, description="arithmetic: operands run from 0 to this")] = 99
    held_out: Annotated[
        float, Meta(gt=0, lt=1, description="share of the problems kept for evaluation, chosen by hash")
    ] = 0.1
    prompt_field: Annotated[
        str, Meta(min_length=1, description="jsonl: field with the prompt, a text or a list of {role, content}")
    ] = "prompt"
    answer_field: Annotated[str, Meta(min_length=1, description="jsonl: field with the answer")] = "answer"
    solution_field: Annotated[
        str, Meta(description="jsonl: field with a worked solution, shown in few-shot examples; empty: the answer")
    ] = ""
    template: Annotated[
        str, Meta(description="the prompt, with {prompt} where the problem goes; empty: what suits the kind")
    ] = ""
    few_shot: Annotated[int, Meta(ge=0, le=64, description="solved examples before each problem")] = 0


class Part(Source, frozen=True):
    """One component of a mixture."""

    weight: Annotated[float, Meta(gt=0, description="share of the prompts, relative to the other parts'")] = 1.0

    def __post_init__(self) -> None:
        if self.kind == "mixture":
            raise ConfigError("task.parts: a part of a mixture cannot be a mixture")
        if self.kind == "given":
            raise ConfigError("task.parts: a part of a mixture cannot be given from Python")
        _check_path("task.parts", self)


class Task(Source, frozen=True):
    chat: Annotated[bool, Meta(description="prompts are user messages in the model's chat template")] = False
    system: Annotated[str, Meta(description="chat: the system message; empty: none")] = ""
    parts: Annotated[
        tuple[Part, ...], Meta(description="mixture: its components, each with kind, weight, path and so on")
    ] = ()

    def __post_init__(self) -> None:
        if (self.kind == "mixture") != bool(self.parts):
            raise ConfigError("task.parts: a mixture needs parts, and nothing else has any")
        if self.parts and (self.path or self.test_path or self.template or self.few_shot):
            raise ConfigError("task.path: a mixture's parts have paths, templates and examples of their own")
        _check_path("task.path", self)
        if self.system and not self.chat:
            raise ConfigError("task.system: cannot take effect without task.chat=true")


def _check_path(key: str, source: Source) -> None:
    if source.kind == "arithmetic" and (source.path or source.test_path):
        raise ConfigError(
            f"{key}: arithmetic makes its own problems; to read a file, set the kind too, such as task=jsonl"
        )


class Conversation(Section, frozen=True):
    """Several turns: what the model says goes to a tool, whose reply comes before its next; see docs/conversations.md."""

    tool: Annotated[
        str,
        Meta(
            description="calculator, python (in the sandbox), command, or FILE.py:FUNCTION called as tool(said, turns); "
            "empty: one turn, no tool"
        ),
    ] = ""
    command: Annotated[
        tuple[str, ...], Meta(description="command: its words; gets JSON on its input, replies on its output")
    ] = ()
    max_turns: Annotated[int, Meta(ge=2, le=1000, description="of the model; after the last no tool is asked")] = 4
    begin: Annotated[
        str, Meta(description="calculator, python: a call stands behind this mark; empty: see docs/conversations.md")
    ] = ""
    end: Annotated[str, Meta(description="calculator, python: and before this one; empty: it runs to the end")] = ""
    reply: Annotated[str, Meta(description="how a reply is put, with {reply} in it, where the prompt is no chat")] = (
        "{reply}"
    )
    role: Annotated[Literal["user", "tool"], Meta(description="chat: whose message a reply is")] = "user"
    max_reply_chars: Annotated[int, Meta(ge=1, description="a longer reply is cut, and says so")] = 2000
    judge: Annotated[
        Literal["last", "all"],
        Meta(description="what is judged: the last turn, or all that was said, replies included"),
    ] = "last"
    workers: Annotated[int, Meta(ge=1, le=256, description="processes that run tools, for each generator")] = 2
    timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="a tool that takes longer is killed; python: besides sandbox.wall_s")
    ] = 5.0
    memory_mb: Annotated[int, Meta(ge=128, description="memory of one call, beyond what the tool itself loads")] = 512
    retries: Annotated[int, Meta(ge=0, le=10, description="a call that failed is tried so often again")] = 1
    max_failure_share: Annotated[
        float,
        Meta(ge=0, le=1, description="of the last 1,000 calls; beyond it the job stops, since its tool is broken"),
    ] = 0.1

    def __post_init__(self) -> None:
        if self.tool and ":" not in self.tool and self.tool not in ("calculator", "python", "command"):
            raise ConfigError(
                f"conversation.tool: unknown tool '{self.tool}'; known: calculator, python, command, or FILE.py:FUNCTION"
            )
        if (self.tool == "command") != bool(self.command):
            raise ConfigError("conversation.command: tool=command needs one, and nothing else has any")
        if "{reply}" not in self.reply:
            raise ConfigError("conversation.reply: must hold {reply} where the tool's words go")
        if self.end and not self.begin:
            raise ConfigError("conversation.end: cannot take effect without conversation.begin")
