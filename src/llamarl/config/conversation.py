"""`conversation`: several turns, and the tool that replies between them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llamarl.config.section import Section
from llamarl.errors import ConfigError


class ConversationConfig(Section, frozen=True):
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
