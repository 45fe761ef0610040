"""Commands that are imported when they are asked for: starting one does not wait for what the others need."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer

from llamarl.cli.help_format import Commands, WholeSentenceHelp


class ImportedCommands(Commands):
    """A set of commands, each given by its name as MODULE:FUNCTION below this package, or as MODULE:GROUP."""

    def __init__(self, references: Mapping[str, str], **settings: Any) -> None:
        class Group(WholeSentenceHelp):
            def __init__(self, **attributes: Any) -> None:
                super().__init__(**attributes)
                self.commands = OnDemand(references)

        super().__init__(group=Group, **settings)


class OnDemand(UserDict[str, Any]):
    """Maps names to commands, each imported when it is first looked at. Looking at a name alone imports nothing."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(found := self.data[name], str):
            found = self.data[name] = _command(name, found)
        return found


def _command(name: str, reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    found = getattr(import_module(f"llamarl.cli.{module}"), attribute)
    if not isinstance(found, Commands):
        function, found = found, Commands(add_completion=False)
        found.command(name)(function)
    command: Any = typer.main.get_command(found)
    command.name = name
    return command
