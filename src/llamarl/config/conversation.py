"""`conversation`: answers of several turns, and the tool that replies between them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class ConversationConfig(Section, frozen=True):
    """Answers of several turns: a tool reads each turn and its reply precedes the next; see docs/conversations.md."""

    tool: Annotated[
        str,
        Meta(
            description="calculator, python (in the sandbox), command, or FILE.py:FUNCTION called as tool(said, turns); "
            "empty: one turn without a tool"
        ),
    ] = ""
    command: Annotated[
        tuple[str, ...],
        Meta(description="command: program and arguments; reads JSON from standard input, replies on standard output"),
    ] = ()
    max_turns: Annotated[
        int, Meta(ge=2, le=1000, description="turns the model may take; the last one gets no reply")
    ] = 4
    begin: Annotated[
        str, Meta(description="calculator, python: marker before a call; empty: see docs/conversations.md")
    ] = ""
    end: Annotated[
        str, Meta(description="calculator, python: marker after a call; empty: a call runs to the end of the turn")
    ] = ""
    reply: Annotated[
        str, Meta(description="template of a tool's reply, with {reply} in it; not used for chat prompts")
    ] = "{reply}"
    role: Annotated[Literal["user", "tool"], Meta(description="chat: role of the message that carries a reply")] = (
        "user"
    )
    max_reply_chars: Annotated[
        int, Meta(ge=1, description="longest reply, in characters; a longer one is cut and marked as cut")
    ] = 2000
    judge: Annotated[
        Literal["last", "all"],
        Meta(description="text that is scored: the last turn, or all turns with their replies"),
    ] = "last"
    workers: Annotated[int, Meta(ge=1, le=256, description="processes that run tools, per generator")] = 2
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="time limit of one call, after which the tool is killed; python: in addition to sandbox.wall_s",
        ),
    ] = 5.0
    memory_mb: Annotated[int, Meta(ge=128, description="memory for one call, beyond what the tool itself loads")] = 512
    retries: Annotated[int, Meta(ge=0, le=10, description="retries of a failed call")] = 1
    max_failure_share: Annotated[
        float,
        Meta(ge=0, le=1, description="the job stops when more than this share of the last 1,000 calls failed"),
    ] = 0.1

    def __post_init__(self) -> None:
        if self.tool and ":" not in self.tool and self.tool not in ("calculator", "python", "command"):
            raise ConfigError(
                f"conversation.tool: unknown tool '{self.tool}'; known: calculator, python, command, or FILE.py:FUNCTION"
            )
        if (self.tool == "command") != bool(self.command):
            raise ConfigError("conversation.command: tool=command needs one, and other tools have none")
        if "{reply}" not in self.reply:
            raise ConfigError("conversation.reply: must hold {reply} where the tool's words go")
        if self.end and not self.begin:
            raise ConfigError("conversation.end: cannot take effect without conversation.begin")
