"""Calls of tools in what a model writes. Which form it uses is read from its chat template.

Two forms are known: `<tool_call>{"name": ..., "arguments": ...}</tool_call>` (Hermes, Qwen), and an answer that is one JSON
object with `name` and `parameters` (Llama 3). What does not parse stays text: nothing the model wrote is lost.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from msgspec import Struct

from llamarl.serve.text import held_back

ToolForm = Literal["tags", "json"]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(Struct, frozen=True):
    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)

    @property
    def for_template(self) -> dict[str, Any]:
        """The call in the form that chat templates read."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@lru_cache(16)
def tool_form(chat_source: str) -> ToolForm | None:
    """The form in which a model with this chat template calls tools; None if the template takes no tools."""
    if not re.search(r"\btools\b", chat_source):
        return None
    return "tags" if _OPEN in chat_source else "json"


def parse_call(text: str) -> ToolCall | None:
    """The call that a JSON text describes; None if it describes none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return _call_of(found)


def _call_of(found: Any) -> ToolCall | None:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return ToolCall(f"call_{secrets.token_hex(12)}", found["name"], arguments) if isinstance(arguments, dict) else None


class ToolText:
    """Splits text that comes piece by piece into words for the user and calls of tools."""

    def __init__(self, form: ToolForm | None) -> None:
        self._form, self._pending = form, ""
        self._calls, self._words = 0, False  # calls so far; whether words stand behind the last one

    def push(self, text: str, *, last: bool) -> tuple[str, list[ToolCall]]:
        """The words and the calls that are complete now."""
        if self._form is None:
            return text, []
        self._pending += text
        return self._tags(last) if self._form == "tags" else self._json(last)

    def _tags(self, last: bool) -> tuple[str, list[ToolCall]]:
        words, calls = "", list[ToolCall]()
        while True:
            if self._calls:  # space behind a call belongs to nobody
                self._pending = self._pending.lstrip() if not self._words else self._pending
            start = self._pending.find(_OPEN)
            end = self._pending.find(_CLOSE, max(0, start))
            if start < 0 or (end < 0 and not last):
                break
            behind = end + len(_CLOSE) if end >= 0 else len(self._pending)
            before, tag = self._pending[:start], self._pending[start:behind]
            call, self._pending = parse_call(tag.removeprefix(_OPEN).removesuffix(_CLOSE)), self._pending[behind:]
            words += before.rstrip() if call else before + tag
            self._words = call is None
            if call:
                calls.append(call)
                self._calls += 1
        ready = self._pending if last else self._safe(start)
        self._pending = self._pending[len(ready) :]
        self._words = self._words or bool(ready)
        return words + ready, calls

    def _safe(self, start: int) -> str:
        """The beginning of what is pending that is words for sure: neither a tag nor space in front of one."""
        end = start if start >= 0 else len(self._pending) - held_back(self._pending, [_OPEN])
        return self._pending[:end].rstrip()

    def _json(self, last: bool) -> tuple[str, list[ToolCall]]:
        """Calls only if all of the text is JSON; everything is held back as long as it may be."""
        start = self._pending.lstrip()
        if self._words or (start and start[0] not in "{["):
            self._words = True
            words, self._pending = self._pending, ""
            return words, []
        if not last:
            return "", []
        words, self._pending = self._pending, ""
        calls = _json_calls(words)
        return ("", calls) if calls else (words, [])


def _json_calls(text: str) -> list[ToolCall]:
    """Calls of a text that is nothing but calls: JSON objects, one behind the other or in a list."""
    decoder, place, found = json.JSONDecoder(), 0, list[Any]()
    text = text.strip()
    while place < len(text):
        try:
            one, place = decoder.raw_decode(text, place)
        except ValueError:
            return []
        found.extend(one if isinstance(one, list) else [one])
        while place < len(text) and text[place] in " \n\t;,":
            place += 1
    calls = [_call_of(one) for one in found]
    return [call for call in calls if call] if all(calls) else []
