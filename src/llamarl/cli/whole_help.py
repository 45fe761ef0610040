"""How the command line shows its help and its usage errors: whole sentences, and one line for a mistake."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from llamarl.config.file import setting_named

# Typer brings a click of its own or uses the installed one: what it raises is found from the one class that it always names.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
SETTINGS = {"help_option_names": ["-h", "--help"]}


class WholeSentences(TyperGroup):
    """Lists commands with all of their first words, which click would cut off at the end of the line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for command in self.commands.values():
            command.short_help = command.short_help or command.help
        super().format_commands(ctx, formatter)


def _setting_meant(error: Any) -> str:
    """The setting that was taken for an option, of a command that has settings."""
    takes_settings = error.ctx and any(one.name == "overrides" for one in error.ctx.command.params)
    option = getattr(error, "option_name", None)  # of an unknown one
    return setting_named(option.lstrip("-").replace("-", "_")) if takes_settings and option else ""


def describe_usage_error(error: Any) -> str:
    """One line: what is wrong, and where the right way stands."""
    command = error.ctx.command_path if error.ctx else "llamarl"
    if setting := _setting_meant(error):
        return (
            f"{error.option_name}: settings are written without dashes, such as {setting}=...; see `{command} --help`"
        )
    wrong = " ".join(error.format_message().split()).removesuffix(".")
    return f"{wrong}{' See' if wrong.endswith('?') else '; see'} `{command} --help`"
