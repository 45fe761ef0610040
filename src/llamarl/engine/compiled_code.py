"""Where compiled code and kernels are kept between starts: a folder that only its user can read.

torch and Triton load what they find there as code, and torch unpickles it. By default torch would take a folder with a
guessable name in the shared temporary folder, where another user may have put something first.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from llamarl.errors import ConfigError


def compiled_environment() -> dict[str, str]:
    """Variables that tell torch and Triton where they keep what they compile. The folder is of this version of torch; both
    tell GPUs apart themselves. ConfigError if there is no folder that can be trusted."""
    problems = []
    for base in _candidates():
        try:
            return _variables(_private(_private(base) / f"torch-{version('torch')}"))
        except OSError as error:
            problems.append(str(error))
    raise ConfigError(
        f"compiled code cannot be kept: {'; '.join(problems)}; set XDG_CACHE_HOME to a folder of your own"
    )


def _candidates() -> Iterator[Path]:
    with suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamarl"
    yield Path(tempfile.gettempdir()) / f"llamarl-{os.geteuid()}"


def _private(folder: Path) -> Path:
    """The folder, made if it is missing; OSError unless it is a real one that only this user can read and write."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no folder, but a link or a file")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _variables(folder: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}


@contextmanager
def compiled_code(*, keep: bool) -> Iterator[None]:
    """In an executor's process: unless `keep`, compiled code goes to a folder of this process, removed at its end."""
    if keep:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="llamarl-compiled-", ignore_cleanup_errors=True) as folder:
        before = dict(os.environ)
        os.environ.update(_variables(Path(folder)))
        try:
            yield
        finally:
            for name in _variables(Path(folder)):
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]
