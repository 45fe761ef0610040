"""Turns go in, replies come out, of every kind of tool; a tool's time-outs and crashes are counted apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.sandboxes import BRIEF, skip_without_sandbox

from llamarl.config import ConversationConfig, SandboxConfig
from llamarl.errors import ConfigError
from llamarl.tasks.failures import Counts
from llamarl.tasks.tools.client import Reply, ToolClient
from llamarl.types import Turn

OWN = """
import os, time

def echo(said, turns):
    if said == "bye":
        return None
    if said == "hang":
        time.sleep(60)
    if said == "crash":
        os._exit(3)
    if said == "raise":
        raise ValueError("no idea")
    if said == "number":
        return 3
    if said == "long":
        return "x" * 100_000
    return f"{len(turns)} turns, {turns[0]['role']} asked {turns[0]['content']!r}, then {said!r}"

async def slowly(said, turns):
    return said.upper()
"""
ASKED = Turn("user", "What?")


def reply(client: ToolClient, said: str, *before: Turn) -> Reply:
    client.ask("key", said, [ASKED, *before, Turn("assistant", said)])
    while not (done := client.collect(1.0)):
        pass
    ((key, found),) = done
    assert key == "key" and not client.num_pending
    return found


def client_with(tool: str, sandbox: SandboxConfig = BRIEF, **settings: object) -> ToolClient:
    client = ToolClient(ConversationConfig(tool=tool, **{"workers": 1, "timeout_s": 1.0, **settings}), sandbox)  # type: ignore[arg-type]
    client.prepare()
    return client


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("own") / "tools.py"
    path.write_text(OWN)
    yield path


def test_the_calculator_computes_what_is_marked() -> None:
    client = client_with("calculator", begin="<calc>", end="</calc>")
    assert reply(client, "I need <calc>12*12</calc>") == Reply("ok", "144")
    assert reply(client, "<calc>1</calc> and <calc>2+2</calc> now") == Reply("ok", "4")
    assert reply(client, "<calc>1/0</calc>") == Reply("ok", "error: division by zero")
    assert reply(client, "<calc>1+1") == Reply("ok", None), "a mark that is not closed is no call"
    assert reply(client, "It is 144.") == Reply("ok", None)


def test_without_marks_it_computes_what_the_conversation_ends_with() -> None:
    client = client_with("calculator")
    client.ask(1, "", [Turn("user", "12+34="), Turn("assistant", "")])
    client.ask(2, "46", [Turn("user", "12+34="), Turn("assistant", "46")])
    client.ask(3, "+1", [Turn("user", "12+34="), Turn("assistant", ""), Turn("user", "46"), Turn("assistant", "+1")])
    assert dict(client.collect()) == {1: Reply("ok", "46"), 2: Reply("ok", None), 3: Reply("ok", "47")}


def test_the_python_tool_runs_programs_in_the_sandbox() -> None:
    skip_without_sandbox()
    client = client_with("python")
    assert reply(client, "```python\nprint(6 * 7)\n```") == Reply("ok", "42\n")
    assert reply(client, "```python\nprint(1)\n1 / 0\n```") == Reply(
        "ok", "1\nerror: ZeroDivisionError: division by zero"
    )
    assert reply(client, "```python\nwhile True: pass\n```").text in (
        "error: it took too long",
        "error: ended with status 9",
    )
    assert reply(client, "```python\nopen('/etc/passwd')\n```").text != ""
    assert "Error" in str(reply(client, "```python\nopen('/etc/passwd')\n```").text)
    assert reply(client, "It is 42.") == Reply("ok", None)
    assert not client.take_counts(), "what a program does wrong is no failure of the tool"
    client.close()


def test_a_users_function_sees_the_turns_and_its_failures_are_counted(own: Path) -> None:
    client = client_with(f"{own}:echo", retries=1, max_reply_chars=20)
    assert reply(client, "hi").text == "2 turns, user asked  ... (cut off)"
    assert reply(client, "bye") == Reply("ok", None)
    assert len(reply(client, "long").text or "") < 50
    assert not client.take_counts()
    failed = reply(client, "raise")
    assert failed.reason == f"tool failed: ValueError: no idea ({own}:12)"
    assert (failed.status, failed.text, failed.trace.splitlines()[-1]) == ("error", None, "ValueError: no idea")
    assert reply(client, "crash").status == "error"
    assert reply(client, "number").reason == "tool gave int; it must give text, or None at the end"
    assert client.take_counts() == Counts(6, 0), "each is tried twice"
    assert reply(client, "hang").status == "timeout"
    assert client.take_counts() == Counts(0, 2)
    assert reply(client, "bye") == Reply("ok", None), "and then it goes on"
    client.close()


def test_a_function_may_be_async(own: Path) -> None:
    client = client_with(f"{own}:slowly")
    assert reply(client, "hi\ud800").text == "HI?", "half a character has no tokens"
    client.close()


def test_a_command_gets_json_and_replies_with_what_it_prints(tmp_path: Path) -> None:
    script = tmp_path / "tool.py"
    script.write_text(
        "import json, sys\nasked = json.load(sys.stdin)\nif asked['said'] == 'fail': sys.exit('broken')\n"
        "if asked['said'] != 'bye': print(len(asked['turns']), asked['said'])"
    )
    client = client_with("command", command=(sys.executable, str(script)), retries=0, timeout_s=10.0)
    assert reply(client, "hello") == Reply("ok", "2 hello")
    assert reply(client, "bye") == Reply("ok", None)
    assert reply(client, "fail") == Reply("error", None, "tool failed: ToolFailed: exit code 1: broken")
    client.close()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tool": "abacus"}, "conversation.tool: unknown tool 'abacus'"),
        ({"tool": "command"}, "conversation.command"),
        ({"command": ("ls",)}, "conversation.command"),
        ({"tool": "calculator", "reply": "x"}, "conversation.reply: must hold {reply}"),
        ({"tool": "calculator", "end": "x"}, "conversation.end"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        ConversationConfig(**settings)  # type: ignore[arg-type]
    assert complaint in str(error.value)


def test_a_tool_that_cannot_be_loaded_shows_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"conversation\.tool: no file"):
        client_with(f"{tmp_path}/none.py:tool")
