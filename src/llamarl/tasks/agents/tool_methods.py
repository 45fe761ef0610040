"""Methods of an environment that the model may call as tools: their schemas, and calls with what the model wrote."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from llamarl.errors import ConfigError
from llamarl.tasks.agents.calling import awaited

_KEY = "agent.environment"
_OWN = frozenset({"reset", "step", "reward", "done", "players", "close"})  # names with a meaning of their own
_SECTION = re.compile(r"[A-Z]\w*:$")  # Args:, Returns: ...
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


class ToolMethod(Struct, frozen=True):
    """A method as the model sees it, and the form that its arguments must have."""

    name: str
    schema: dict[str, Any]
    arguments: type[Struct]


class ToolMethods:
    """The public methods of a class that have no meaning of their own. All of them must be typed and documented."""

    def __init__(self, made: type, reference: str) -> None:
        self._methods = {name: _tool_method(made, name, reference) for name in _names(made)}

    def __bool__(self) -> bool:
        return bool(self._methods)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the form of a chat request."""
        return [method.schema for method in self._methods.values()]

    async def call(self, environment: Any, call: Mapping[str, Any]) -> tuple[str, bool]:
        """The result of a call as text, and whether it was a proper one. What the model did wrong is told to the model: an
        unknown name, arguments that do not fit, or a ValueError of the method. Anything else that the method raises is not
        the model's fault."""
        name, text = call["function"]["name"], call["function"]["arguments"]
        method = self._methods.get(name)
        if method is None:
            return f"error: there is no tool '{name}'; there are: {', '.join(self._methods)}", False
        try:
            arguments = msgspec.json.decode(text, type=method.arguments)
        except msgspec.MsgspecError as error:
            return f"error: {name}: {error}", False
        named = {field: getattr(arguments, field) for field in method.arguments.__struct_fields__}
        try:
            return _as_text(await awaited(getattr(environment, name), **named)), True
        except ValueError as error:
            return f"error: {error}", False


def looks_like_a_call(text: str) -> bool:
    """Whether text without a call in it was meant as one: a tag or JSON that does not parse."""
    return "<tool_call>" in text or text.lstrip().startswith(("{", "["))


def _names(made: type) -> list[str]:
    """Public methods, in the order in which they are written."""
    order = [name for one in reversed(made.__mro__[:-1]) for name in vars(one)]
    return [
        name
        for name in dict.fromkeys(order)
        if not name.startswith("_") and name not in _OWN and inspect.isfunction(inspect.getattr_static(made, name))
    ]


def _tool_method(made: type, name: str, reference: str) -> ToolMethod:
    function, place = getattr(made, name), f"{_KEY}: {reference}: the tool {name}"
    if not (text := inspect.getdoc(function)):
        raise ConfigError(f"{place} has no docstring, which tells the model what it does; helpers begin with _")
    try:
        types = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{place} has a type that cannot be read: {error}") from None
    fields: list[Any] = []
    for parameter in [*inspect.signature(function).parameters.values()][1:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{place} takes *{parameter.name}; the arguments of a tool have names")
        if parameter.name not in types:
            raise ConfigError(f"{place} has no type for '{parameter.name}', which tells the model what to write")
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, types[parameter.name], *default))
    try:
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        parameters = _parameters(arguments, _documented(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place} has an argument that JSON cannot give: {error}") from None
    told = {"name": name, "description": _summary(text), "parameters": parameters}
    return ToolMethod(name, {"type": "function", "function": told}, arguments)


def _parameters(arguments: type[Struct], documented: Mapping[str, str]) -> dict[str, Any]:
    """JSON schema of a method's arguments."""
    _, components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    whole = components.pop(arguments.__name__)
    properties = {
        name: {**schema, "description": documented[name]} if name in documented else schema
        for name, schema in whole["properties"].items()
    }
    found = {"type": "object", "properties": properties, "required": list(whole.get("required", ()))}
    return {**found, "$defs": components} if components else found


def _summary(text: str) -> str:
    """The docstring up to its first section."""
    lines: list[str] = []
    for line in text.splitlines():
        if _SECTION.fullmatch(line.strip()):
            break
        lines.append(line.strip())
    return " ".join(filter(None, lines))


def _documented(text: str) -> dict[str, str]:
    """What the section Args of a docstring says about each argument; lines without a name continue the one before."""
    _, _, section = text.partition("\nArgs:\n")
    found: dict[str, str] = {}
    name = ""
    for line in _until_section(section.splitlines()):
        if match := _ARGUMENT.fullmatch(line.strip()):
            name, said = match.groups()
            found[name] = said
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def _until_section(lines: Sequence[str]) -> list[str]:
    end = next((at for at, line in enumerate(lines) if _SECTION.fullmatch(line.strip())), len(lines))
    return [*lines[:end]]


def _as_text(result: Any) -> str:
    if result is None or isinstance(result, str):
        return result or ""
    return json.dumps(result, ensure_ascii=False, default=str)
