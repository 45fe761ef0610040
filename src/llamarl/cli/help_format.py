"""Help and usage errors of the command line: whole sentences, and one line per mistake."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from llamarl.config.file import setting_named

# Typer uses its own copy of click or the installed one; the base of an error that it exports is right for both.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
SETTINGS = {"help_option_names": ["-h", "--help"]}


class WholeSentenceHelp(TyperGroup):
    """A command group whose help shows each command's whole first sentence; click would cut it off at the line's end."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for command in self.commands.values():
            command.short_help = command.short_help or command.help
        super().format_commands(ctx, formatter)


def _setting_meant(error: Any) -> str:
    """The setting that the user wrote as an option, if the command takes settings; else ""."""
    takes_settings = error.ctx and any(one.name == "overrides" for one in error.ctx.command.params)
    option = getattr(error, "option_name", None)  # present if the option is unknown
    return setting_named(option.lstrip("-").replace("-", "_")) if takes_settings and option else ""


def describe_usage_error(error: Any) -> str:
    """One line that says what is wrong and where the help is."""
    command = error.ctx.command_path if error.ctx else "llamarl"
    if setting := _setting_meant(error):
        return (
            f"{error.option_name}: settings are written without dashes, such as {setting}=...; see `{command} --help`"
        )
    wrong = " ".join(error.format_message().split()).removesuffix(".")
    return f"{wrong}{' See' if wrong.endswith('?') else '; see'} `{command} --help`"
