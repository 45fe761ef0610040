"""Makes tools by their names in the config. A tool takes the model's last turn and all turns so far, and returns a reply, or
None at the end of the conversation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence

import msgspec

from llamarl.config import ConversationConfig, SandboxConfig
from llamarl.plugins import check_call, load_function
from llamarl.tasks.code_blocks import fenced_program
from llamarl.tasks.sandbox.probe import open_sandbox
from llamarl.tasks.sandbox.run import Ran
from llamarl.tasks.tools.calculator import NoExpression, compute, last_expression
from llamarl.types import Turn

Tool = Callable[[str, Sequence[Turn]], str | None]
IN_PROCESS = ("calculator",)  # safe and quick by construction; all other tools run in workers
NAMES = ("calculator", "python", "command")


class ToolFailed(Exception):
    """The tool itself failed; the model is not to blame."""


def marked_call(said: str, begin: str, end: str) -> str | None:
    """Return the text between the last pair of marks, or None without one. If no marks are set, return all of it."""
    if not begin:
        return said
    _, found, rest = said.rpartition(begin)
    return rest.partition(end)[0] if found and (not end or end in rest) else None


def make_calculator(settings: ConversationConfig) -> Tool:
    """Compute the marked expression. Without marks, compute the expression at the end of the conversation, including the
    prompt: after "4+5=" the model need not write anything."""

    def calculate(said: str, turns: Sequence[Turn]) -> str | None:
        if settings.begin:
            expression = marked_call(said, settings.begin, settings.end)
        else:
            expression = last_expression("".join(turn.content for turn in turns))
        if expression is None:
            return None
        try:
            return compute(expression)
        except NoExpression as error:
            return f"error: {error}"

    return calculate


def make_python(settings: ConversationConfig, limits: SandboxConfig) -> Tool:
    """Run the marked or fenced program and reply with its output, including its errors."""
    sandbox = open_sandbox(limits)

    def run(said: str, turns: Sequence[Turn]) -> str | None:
        program = marked_call(said, settings.begin, settings.end) if settings.begin else fenced_program(said)
        return None if program is None else _told(sandbox.run(program))

    return run


def _told(ran: Ran) -> str:
    printed = ran.stdout.decode(errors="replace")
    if ran.how == "timeout":
        return f"{printed}error: it took too long"
    if ran.how == "flooded":
        return f"{printed}error: it printed too much"
    if ran.status:
        last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return f"{printed}error: {last[0] if last else f'ended with status {ran.status}'}"
    return printed


def make_command(settings: ConversationConfig) -> Tool:
    """Run the user's command with {"said", "turns"} as JSON on its input and the reply on its output. No output ends the
    conversation; any exit code but 0 is a failure of the tool."""

    def run(said: str, turns: Sequence[Turn]) -> str | None:
        asked = json.dumps({"said": said, "turns": msgspec.to_builtins(turns)})
        done = subprocess.run(list(settings.command), input=asked.encode(), capture_output=True, check=False)
        if done.returncode:
            said_last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ToolFailed(f"exit code {done.returncode}{': ' + said_last[0] if said_last else ''}")
        return done.stdout.decode(errors="replace").removesuffix("\n") or None

    return run


def load_tool(settings: ConversationConfig, sandbox: SandboxConfig) -> Tool:
    """Load the tool. Raises ConfigError if that fails."""
    match settings.tool:
        case "calculator":
            return make_calculator(settings)
        case "python":
            return make_python(settings, sandbox)
        case "command":
            return make_command(settings)
    function = load_function("conversation.tool", settings.tool)
    check_call("conversation.tool", settings.tool, function, ("said", "turns"))
    return lambda said, turns: function(said, msgspec.to_builtins(turns))
