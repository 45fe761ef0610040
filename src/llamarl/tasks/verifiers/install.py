"""Installs an environment of verifiers into a virtual environment of its own."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from llamarl.errors import InputError
from llamarl.tasks.verifiers.host import OLDEST
from llamarl.tasks.verifiers.program import HOST, last_line

VERIFIERS = "verifiers"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NEEDED = (f"verifiers>={'.'.join(map(str, OLDEST))}", "uv")  # its harnesses are started by uv


def package_name(requirement: str) -> str:
    """`my-env` of `my-env[extra]>=1.2`, of a wheel, and of a folder with a project in it."""
    path = Path(requirement)
    name = path.absolute().name.partition("-")[0] if path.suffix == ".whl" else path.absolute().name
    found = _NAME.match(name if path.exists() else requirement)
    if found is None:
        raise InputError(f"env install: '{requirement}' is no name of a package, and no such file or folder exists")
    return found[0]


def install_environment(requirement: str, folder: Path, python: str, further: Sequence[str] = ()) -> Path:
    """Make the virtual environment, unless it exists, and install the packages. Returns its Python. Raises InputError."""
    made = folder / "bin" / "python"
    if not made.exists():
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"--at: {folder} exists and is no virtual environment")
        _run([python, "-m", "venv", str(folder)], f"--python: {python} cannot make a virtual environment in {folder}")
    install = [str(made), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*install, *_NEEDED, requirement, *further], f"env install: pip cannot install {requirement}")
    name = package_name(requirement)
    config = {} if name == VERIFIERS else {"taskset": {"id": name}}
    _run([str(made), str(HOST), "check", json.dumps(config), ""], f"env install: {requirement} cannot be used")
    return made


def _run(command: list[str], otherwise: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise InputError(f"{otherwise}: {error.strerror}") from None
    if done.returncode:
        raise InputError(f"{otherwise}: {_reason(done.stdout + done.stderr)}")


def _reason(said: bytes) -> str:
    """The error that pip names last, but not its link to the documentation; else what was said last."""
    errors = [line for line in said.splitlines() if line.startswith(b"ERROR: ") and b"ResolutionImpossible" not in line]
    return last_line(errors[-1].removeprefix(b"ERROR: ")) if errors else last_line(said)
