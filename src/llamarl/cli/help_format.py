"""Help and usage errors of the command line: whole sentences, and one line per mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from llamarl.config.file import describe, setting_named

# Typer uses its own copy of click or the installed one; the base of an error that it exports is right for both.
Function = TypeVar("Function", bound=Callable[..., Any])
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
SETTINGS = {"help_option_names": ["-h", "--help"]}


HELP_OPTION = "show this help and exit"
EXIT_CODES = (
    "Exit codes: 0: done; 1: the answer is no (audit, replay), or another failure; 2: a setting, an argument or a file is "
    "wrong, and nothing was started; 3: the job had to stop; 4: unfinished (audit); 130: interrupted."
)


def complete_setting(incomplete: str) -> list[str]:
    """Settings that begin like this, for shell completion."""
    return [f"{key}=" for key, _, _ in describe() if key.startswith(incomplete)]


# The arguments of all commands that take settings.
OVERRIDES = typer.Argument(
    metavar="KEY=VALUE",
    help="settings, such as trainer.lr=1e-4; they replace a file's",
    autocompletion=complete_setting,
)
CONFIG_FILE = typer.Argument(
    metavar="CONFIG",
    help="a YAML file; without it, the default job",
    show_default=False,
    autocompletion=complete_setting,
)


class PlainCommand(TyperCommand):
    """A command whose help option is worded like the other options."""

    def get_help_option(self, ctx: Any) -> Any:
        return _worded(super().get_help_option(ctx))


def _worded(option: Any) -> Any:
    if option is not None:
        option.help = HELP_OPTION
    return option


class Commands(typer.Typer):
    """A set of commands with the same style of help."""

    def __init__(self, *, group: type[TyperGroup] | None = None, **settings: Any) -> None:
        super().__init__(cls=group or WholeSentenceHelp, context_settings=SETTINGS, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        return super().command(name, **{"cls": PlainCommand, **settings})


class WholeSentenceHelp(TyperGroup):
    """A command group whose help shows each command's whole first paragraph; click would cut it off at the line's end."""

    def get_help_option(self, ctx: Any) -> Any:
        return _worded(super().get_help_option(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for command in self.commands.values():
            command.short_help = command.short_help or (command.help or "").partition("\n\n")[0]
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
