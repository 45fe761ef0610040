"""All commands speak alike: help in the same words, the same options by the same names, mistakes in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from helpers.cli import llamarl

from llamarl import __version__
from llamarl.cli import app

ROOT: Any = typer.main.get_command(app)


def walk(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inside in getattr(command, "commands", {}).items():
        yield (*path, name), inside
        yield from walk(inside, (*path, name))


COMMANDS = dict(walk())
EACH = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


@EACH
def test_help_is_there_in_whole_sentences(path: tuple[str, ...]) -> None:
    short, long = llamarl(*path, "-h"), llamarl(*path, "--help")
    assert (short.code, short.err) == (0, "") and short == long
    assert short.out.startswith(f"Usage: llamarl {' '.join(path)} ")
    assert "-h, --help" in short.out and "show this help and exit" in short.out
    text = COMMANDS[path].help
    assert text[0].isupper() and text.rstrip().endswith("."), text


@EACH
def test_every_argument_and_option_says_what_it_is_in_a_phrase(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        said = parameter.help or ""
        assert said, f"{parameter.name} has no help"
        assert not said.endswith("."), said
        first = said.split()[0]
        assert not first[0].isupper() or first.isupper() or not first[1:].islower() or first in {"GB/s", "GPUs"}, said


@EACH
def test_the_same_things_have_the_same_names(path: tuple[str, ...]) -> None:
    for parameter in COMMANDS[path].params:
        if "--json" in parameter.opts and parameter.is_flag:  # `bench --calibrate` takes a file
            assert parameter.help.startswith("print ") and "JSON" in parameter.help
        if parameter.metavar == "RUN":
            assert parameter.help == "a run folder"
        if parameter.metavar == "KEY=VALUE":
            assert parameter.name == "overrides" and parameter.help.startswith("settings, such as ")
        if parameter.param_type_name == "option":
            assert not any(name.startswith("--no-") for name in parameter.secondary_opts), parameter.opts


@EACH
def test_an_unknown_option_is_one_line_and_exit_code_2(path: tuple[str, ...]) -> None:
    shown = llamarl(*path, "--no-such-option")
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1), shown
    assert shown.err.startswith("llamarl: ") and f"`llamarl {path[0]}" in shown.err


def test_an_unknown_command_is_one_line_and_exit_code_2() -> None:
    shown = llamarl("no-such-command")
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)


def test_all_commands_are_listed_with_their_first_paragraph_and_the_exit_codes() -> None:
    words = llamarl("--help").out.split()
    text = " ".join(words)
    for path, command in COMMANDS.items():
        if len(path) == 1:
            assert path[0] in words
            assert " ".join(command.help.partition("\n\n")[0].split())[:40] in text
    assert "Exit codes: 0: done;" in text
    assert llamarl().out == llamarl("--help").out


def test_the_version_is_printed() -> None:
    assert llamarl("--version").out == f"llamarl {__version__}\n"


def complete(*words: str) -> list[str]:
    environment = {**os.environ, "_LLAMARL_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(("llamarl", *words))}
    environment["COMP_CWORD"] = str(len(words))
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from llamarl.cli import main; main(); print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    return done.stdout.split()


def test_shells_complete_commands_options_and_settings() -> None:
    assert complete("ro") == ["rollouts"]
    assert "--worst" in complete("rollouts", "--w")
    assert complete("train", "schedule.max_st") == ["schedule.max_staleness="]
    assert "trainer.lr=" in complete("train", "job.yaml", "trainer.l")
    assert "_LLAMARL_COMPLETE" in llamarl("--show-completion", "bash").out


def test_a_command_does_not_wait_for_what_others_need() -> None:
    program = "import sys; from llamarl.cli import run_command; run_command(); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program, "runs", "--help"], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "llamarl.cli.runs" in loaded
    assert not {"torch", *(f"llamarl.cli.{name}" for name in ("train", "bench", "serve", "plan"))} & {*loaded}
