"""`llamarl env install`: a virtual environment is made, pip is asked, and every failure is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.brief import ROOT
from helpers.cli import llamarl

from llamarl.tasks.verifiers.install import package_name

# In place of Python: makes "virtual environments" of itself, and its pip has every package but `nosuch` and `older`.
PYTHON = f"""#!/bin/sh
case "$2" in
  venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
  pip) echo "$@" >> "{{log}}"
    case "$*" in
      *nosuch*) echo "ERROR: No matching distribution found for nosuch" >&2; exit 1;;
      *older*) echo "ERROR: Cannot install older and verifiers>=0.4 because these conflict." >&2
        echo "ERROR: ResolutionImpossible: see https://pip.pypa.io" >&2; exit 1;;
    esac;;
  *) PYTHONPATH="{ROOT / "tests" / "data" / "stand_ins"}" exec "{sys.executable}" "$@";;
esac
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "python"
    program.write_text(PYTHON.replace("{log}", str(tmp_path / "log")))
    program.chmod(0o755)
    return program


def test_the_settings_that_train_on_it_are_printed(python: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second time, the virtual environment is there
        code, out, _ = llamarl("env", "install", "sums[extra]>=1", "--with", "more", "--python", python)
        assert code == 0
        assert out == (
            "task=verifiers task.env=sums task.env_python=environments/sums/bin/python agent.environment=verifiers\n"
        )
    asked = (tmp_path / "log").read_text().splitlines()
    assert asked == ["-m pip install --quiet --disable-pip-version-check verifiers>=0.4 uv sums[extra]>=1 more"] * 2


def test_tasksets_of_verifiers_itself_are_not_guessed(python: Path) -> None:
    code, out, _ = llamarl("env", "install", "verifiers[ta]", "--at", "games", "--python", python)
    assert code == 0
    assert "task.env=NAME_OF_A_TASKSET task.env_python=games/bin/python " in out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nosuch", "env install: pip cannot install nosuch: No matching distribution found for nosuch"),
        (
            "older",
            "env install: pip cannot install older: Cannot install older and verifiers>=0.4 because these conflict.",
        ),
        ("old", "env install: old cannot be used: old has the old interface of verifiers (v0, load_environment);"),
        ("other", "env install: other cannot be used: ModuleNotFoundError: taskset 'other' not found"),
        ("../nowhere", "env install: '../nowhere' is no name of a package, and no such file or folder exists"),
    ],
)
def test_what_cannot_be_installed_or_used_is_one_line(python: Path, name: str, told: str) -> None:
    code, out, err = llamarl("env", "install", name, "--python", python)
    assert (code, out) == (2, "")
    assert f"llamarl: {told}" in err and err.count("\n") <= 2


def test_a_folder_of_something_else_and_a_missing_python_are_refused(python: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    _, _, err = llamarl("env", "install", "sums", "--at", "mine", "--python", python)
    assert "llamarl: --at: mine exists and is no virtual environment\n" in err
    _, _, err = llamarl("env", "install", "sums", "--python", "/no/python")
    assert "--python: /no/python cannot make a virtual environment in environments/sums: No such file" in err


def test_the_package_is_found_in_names_wheels_and_folders(tmp_path: Path) -> None:
    (tmp_path / "my-env").mkdir()
    (tmp_path / "my_env-1.0-py3-none-any.whl").touch()
    assert package_name("my-env[a]==1") == package_name(str(tmp_path / "my-env")) == "my-env"
    assert package_name(str(tmp_path / "my_env-1.0-py3-none-any.whl")) == "my_env"
