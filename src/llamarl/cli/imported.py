"""Commands that are imported when they are asked for: starting one does not wait for what the others need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
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


class OnDemand(MutableMapping[str, Any]):
    """Maps names to commands. Looking at a name alone imports nothing."""

    def __init__(self, references: Mapping[str, str]) -> None:
        self._references, self._made = dict(references), dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _command(name, self._references[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._references

    def __iter__(self) -> Iterator[str]:
        return iter(self._references)

    def __len__(self) -> int:
        return len(self._references)

    def __setitem__(self, name: str, command: Any) -> None:
        self._references.setdefault(name, "")
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._references[name]
        self._made.pop(name, None)


def _command(name: str, reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    found = getattr(import_module(f"llamarl.cli.{module}"), attribute)
    if not isinstance(found, Commands):
        function, found = found, Commands(add_completion=False)
        found.command(name)(function)
    command: Any = typer.main.get_command(found)
    command.name = name
    return command
