"""`llamarl env`: environments of verifiers, which live in virtual environments of their own. No torch here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from llamarl.cli.help_format import Commands

env = Commands(help="Install environments of verifiers.", add_completion=False)


@env.callback()
def _group() -> None:
    """Install environments of verifiers, each in a virtual environment of its own."""


@env.command("install")
def install_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="what pip is to install, such as my-env or a folder")],
    at: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="the virtual environment; default: environments/NAME")
    ] = None,
    further: Annotated[
        list[str] | None, typer.Option("--with", metavar="PACKAGE", help="further package that pip is to install")
    ] = None,
    python: Annotated[
        str, typer.Option(metavar="PYTHON", help="the Python that makes it; default: the one of LlamaRL")
    ] = "",
) -> None:
    """Install an environment of verifiers by pip, and print the settings that train on it.

    It is put into a virtual environment of its own, which is made first, or used again if it exists."""
    from llamarl.tasks.verifiers.install import VERIFIERS, install_environment, package_name

    known = package_name(name)
    folder = at or Path("environments") / known
    print(f"installing {name} into {folder}; this may take minutes", file=sys.stderr, flush=True)
    made = install_environment(name, folder, python or sys.executable, further or ())
    named = "NAME_OF_A_TASKSET" if known == VERIFIERS else known
    print(f"task=verifiers task.env={named} task.env_python={shlex.quote(str(made))} agent.environment=verifiers")
