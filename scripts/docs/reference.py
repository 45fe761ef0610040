"""docs/settings.md from the config and docs/cli.md from the command line: `python scripts/docs/reference.py --write`."""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from msgspec import Meta

from llamarl.cli import app
from llamarl.cli.help_format import EXIT_CODES
from llamarl.config import Config, Section
from llamarl.config.file import describe

DOCS = Path(__file__).parents[2] / "docs"
_PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")
_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text"}
_TOP = "the job"


def settings_page() -> str:
    """Every setting: name, type with its range, default, meaning."""
    found: dict[str, list[str]] = {}
    for key, default, meaning in describe():
        found.setdefault(key.rpartition(".")[0] or _TOP, []).append(_row(key, default, meaning))
    parts = [
        "# Settings",
        f"All {sum(map(len, found.values()))} settings of a job, made from `llamarl.config`. `llamarl config` prints them\n"
        "as a YAML file to start from; `llamarl train job.yaml trainer.lr=1e-4` replaces one of them. A wrong name or value\n"
        "ends the command with one line before anything starts; so do nearly all settings that the job would not read.\n"
        "(A run that goes on may keep those that an earlier release took.)",
        " · ".join(f"[{name}](#{name.replace('.', '').replace(' ', '-')})" for name in found),
    ]
    for name, rows in found.items():
        about = _linked(" ".join((_section(name).__doc__ or "").split()))
        head = "| setting | type | default | meaning |\n|---|---|---|---|"
        parts += [f"## {name}", about, "\n".join([head, *rows])]
    return "\n\n".join(parts) + "\n"


def _row(key: str, default: str, meaning: str) -> str:
    shown = f"`{default}`" if default not in ("''", "null") else ("empty" if default == "''" else "none")
    return f"| `{key}` | {_type(_hint(key))} | {shown} | {_cell(re.sub(r' [(][^()]* [|] [^()]*[)]$', '', meaning))} |"


def _section(name: str) -> type[Section]:
    return Config if name == _TOP else typing.cast("type[Section]", _hint(name))


def _hint(key: str) -> Any:
    hint: Any = Config
    for name in key.split("."):
        hint = typing.get_type_hints(hint, include_extras=True)[name]
    return hint


def _type(hint: Any) -> str:
    """A type in words, with its range: "integer, at least 1"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return ", ".join([_type(arguments[0]), *(one for meta in arguments[1:] for one in _limits(meta))])
    if origin is typing.Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys("none" if one is type(None) else _type(one) for one in arguments))
    if origin in (tuple, list):
        kinds = dict.fromkeys(_type(one) for one in arguments if one is not Ellipsis)
        size = "" if Ellipsis in arguments or origin is list else f"{len(arguments)} "
        return f"list of {size}{' or '.join(kinds)}"
    if origin is not None:
        return "mapping"
    return _WORDS.get(hint, "mapping" if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else "any")


def _limits(meta: Any) -> Iterator[str]:
    if not isinstance(meta, Meta):
        return
    for name, word in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if (limit := getattr(meta, name)) is not None:
            yield f"{word} {limit:,}" if limit < 2**40 else f"{word} 2^{limit.bit_length() - 1}"
    if meta.min_length:
        yield "not empty"


def _cell(text: str) -> str:
    return _linked(text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*"))


def _linked(text: str) -> str:
    """Names of pages become links."""
    return _PAGE.sub(r"[\1](\1.md)", text)


def cli_page() -> str:
    """Every command: what it does, how it is called, its arguments and options."""
    root: Any = typer.main.get_command(app)
    every = list(_commands(root))
    rows = [f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(_first(command.help))} |" for name, command in every]
    parts = [
        "# Commands",
        "Made from the command line itself; `--help` behind a command prints the same. `KEY=VALUE` stands for any of the\n"
        "[settings](settings.md).",
        "\n".join(["| command | |", "|---|---|", *rows]),
        EXIT_CODES,
    ]
    for name, command in every:
        parts += [f"## {name}", _linked(_body(command.help)), f"```text\n{_usage(name, command)}\n```"]
        if rows := [_parameter(one) for one in command.params if not one.hidden]:
            parts.append("\n".join(["| | | default |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, path: str = "llamarl") -> Iterator[tuple[str, Any]]:
    for name, inside in getattr(command, "commands", {}).items():
        full = f"{path} {name}"
        if not getattr(inside, "commands", None) or inside.invoke_without_command:
            yield full, inside
        yield from _commands(inside, full)


def _first(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())


def _body(text: str | None) -> str:
    paragraphs = (text or "").replace("\b", "").split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs if one.strip()).replace("<", "&lt;")


def _usage(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    shown = [_argument(one) if one.required else f"[{_argument(one)}]" for one in arguments]
    return " ".join([name, *shown, *(["[OPTIONS]"] if len(arguments) < len(command.params) else [])])


def _argument(one: Any) -> str:
    name = one.metavar or one.name.upper()
    return f"{name}..." if one.nargs == -1 else name


def _parameter(one: Any) -> str:
    if one.param_type_name == "argument":
        return f"| `{_argument(one)}` | {_cell(one.help or '')} | |"
    value = "" if one.is_flag else f" {one.metavar or one.opts[-1].lstrip('-').replace('-', '_').upper()}"
    return f"| `{', '.join(one.opts)}{value}` | {_cell(one.help or '')} | {_default(one.default)} |"


def _default(value: Any) -> str:
    plain = getattr(value, "value", value)
    return f"`{plain}`" if isinstance(plain, str | int | float) and not isinstance(plain, bool) and plain != "" else ""


PAGES = {"settings.md": settings_page, "cli.md": cli_page}

if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for _name, _make in PAGES.items():
        (DOCS / _name).write_text(_make())
