"""Chat templates: the Jinja text that comes with a model, rendered in a sandbox.

A template is an untrusted program. It gets the messages and the special tokens and cannot reach Python; its loops,
repetitions and output are bounded.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamarl.errors import ConfigError, ModelError

_MAX_CHARS = 4_000_000
_MAX_LOOPS = 100_000
_MAX_EXPONENT = 64
_MAX_BASE = 1 << 32

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
ChatOptions = Mapping[str, bool | int | float | str]
_GIVEN = ("tools", "documents")  # to every template, without a value
_SET = ("messages", "add_generation_prompt")


class Template(Protocol):
    source: str  # its Jinja text; empty if there is none

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a chat. `options` replace those of the template for this one text; an unknown one is refused."""
        ...


class NoChatTemplate:
    source = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        raise ModelError(f"{self._folder}: the model has no chat template; give it plain prompts")


class ChatTemplate:
    """A chat template with the values of its options. An option that it does not read is refused."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], folder: Path, options: ChatOptions | None = None
    ) -> None:
        self._folder, self.source = folder, source
        self._values: dict[str, Any] = {**special_tokens, **dict.fromkeys(_GIVEN), **(options or {})}
        self._sandbox, self._special_tokens = _Sandbox(), special_tokens
        try:
            self._template = self._sandbox.from_string(source)
            if options:
                self._check_options(options)
        except jinja2.TemplateError as error:
            raise ModelError(f"{folder}: chat template: {_line(error)}") from None

    @cached_property
    def _own_options(self) -> set[str]:
        known = meta.find_undeclared_variables(self._sandbox.parse(self.source))
        return known - {*_GIVEN, *_SET, *self._special_tokens, *self._sandbox.globals}

    def _check_options(self, options: Mapping[str, Any]) -> None:
        if wrong := sorted(options.keys() - self._own_options):
            raise ConfigError(
                f"task.chat_options: the chat template of {self._folder} has no option '{wrong[0]}'; it has: "
                f"{', '.join(sorted(self._own_options)) or 'none'}"
            )

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        chat = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        values = self._values | chat
        if options:
            self._check_options(options)
            values |= options
        if tools:
            values["tools"] = [dict(tool) for tool in tools]
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(**values, range=_bounded_range()):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > _MAX_CHARS:
                    raise SecurityError(f"wrote more than {_MAX_CHARS} characters")
        except Exception as error:  # foreign code: a template may fail in any way Python can
            raise ModelError(f"{self._folder}: chat template: {_line(error)}") from None
        return "".join(pieces)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _bounded_range() -> Callable[..., range]:
    """`range` with one limit for the whole rendering, so that nested loops end too."""
    left = _MAX_LOOPS

    def bounded(*args: int) -> range:
        nonlocal left
        numbers = range(*args)
        left -= len(numbers)
        if left < 0:
            raise SecurityError(f"looped more than {_MAX_LOOPS} times")
        return numbers

    return bounded


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for loss masks. Here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that transformers gives to templates, with limits on the size of any result."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= _MAX_BASE and abs(right) <= _MAX_EXPONENT):
            raise SecurityError("raised a number to too high a power")
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and len(sequence) * times > _MAX_CHARS:
                raise SecurityError("repeated a text too often")
        return super().call_binop(context, operator, left, right)


def _tojson(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, **_: Any) -> str:
    """JSON without HTML escapes: those of Jinja's own filter would change the prompt."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
