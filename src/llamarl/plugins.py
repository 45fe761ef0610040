"""User functions that the config names as FILE.py:FUNCTION."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamarl.errors import ConfigError

_importing: list[Path] = []  # user files that are being imported now
_MAX_SAID = 200
_MAX_LINES = 100
_OURS = str(Path(__file__).parent) + os.sep
_INSTALLED = tuple({path + os.sep for path in sysconfig.get_paths().values()})


def is_reference(name: str) -> bool:
    """Whether a setting has the form FILE.py:FUNCTION."""
    return ":" in name


def split_reference(text: str) -> tuple[Path, str] | None:
    """File and function of FILE.py:FUNCTION; None for any other text."""
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    return (path, name) if path.suffix == ".py" and name.isidentifier() else None


def load_function(key: str, reference: str) -> Callable[..., Any]:
    """Import the file and return the function. Errors name the setting `key`."""
    found = split_reference(reference)
    if found is None:
        raise ConfigError(f"{key}: '{reference}' is neither a known name nor FILE.py:FUNCTION")
    path, name = found
    if not path.is_file():
        beside = "" if path.is_absolute() else "; paths begin in the folder where the command runs"
        raise ConfigError(f"{key}: no file {path}{beside}")
    function = getattr(_import(key, path), name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {path} has no function '{name}'")
    return function  # type: ignore[no-any-return]


def reference_to(function: Callable[..., Any]) -> str:
    """The FILE.py:NAME from which another process can import the same function, or a callable object that the file holds
    under that name; empty if it cannot."""
    for module in filter(None, map(sys.modules.get, _homes(function))):
        file = getattr(module, "__file__", None) or ""
        name = _name_in(module, function)
        if name and file.endswith(".py") and Path(file).is_file():
            return f"{file}:{name}"
    return ""


def _homes(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the modules that may hold it. An object may be made elsewhere than its class: in the script itself."""
    home = getattr(function, "__module__", None) or ""
    return (home,) if hasattr(function, "__qualname__") else (home, "__main__")


def _name_in(module: Any, function: Callable[..., Any]) -> str:
    own = getattr(function, "__qualname__", None)
    names = [own] if own else [name for name, value in vars(module).items() if value is function]
    return next((name for name in names if name.isidentifier() and getattr(module, name, None) is function), "")


def _import(key: str, path: Path) -> Any:
    module_name = f"llamarl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and typing look up modules there
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # lets it import its neighbors; at the end, so that they hide no other module
    _importing.append(path)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code: whatever it raises becomes one line
        raise ConfigError(f"{key}: {path} cannot be imported: {describe_error(error)}") from error
    finally:
        _importing.pop()
    return module


def refuse_while_importing() -> None:
    """Raise ConfigError if a user file is being imported. A script that both starts a job and defines a function for it is
    imported by the job's processes; without the usual guard, each would start another job."""
    if _importing:
        raise ConfigError(
            f'{_importing[-1].name} starts a job when it is imported; put that under `if __name__ == "__main__":`'
        )


def describe_error(error: BaseException) -> str:
    """An error and its place in the user's code in one line: `ValueError: no digits (my.py:12)`."""
    said = " ".join(str(error).split())[:_MAX_SAID]
    printable = "".join(char if char.isprintable() else "?" for char in said)
    place = _place_of(error)
    return f"{type(error).__name__}{': ' if printable else ''}{printable}{f' ({place})' if place else ''}"


def _place_of(error: BaseException) -> str:
    """`file:line` of the innermost frame that is neither ours nor in an installed package; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    return f"{_short(own[-1].filename)}:{own[-1].lineno}" if own else ""


def _is_installed(file: str) -> bool:
    return file.startswith(("<", _OURS, *_INSTALLED))


def _short(file: str) -> str:
    """The path relative to the working directory, if the file is in it."""
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


def format_traceback(error: BaseException) -> str:
    """The traceback for a log, limited to its last lines; empty if no user code was involved."""
    if not _place_of(error):
        return ""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(line[:_MAX_SAID] for line in lines[-_MAX_LINES:])


def check_call(key: str, reference: str, function: Callable[..., Any], names: Sequence[str]) -> None:
    """Raise ConfigError if the function cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise ConfigError(f"{key}: {reference} cannot be called with ({', '.join(names)}): {error}") from None
    except ValueError:
        return  # no signature, as with some functions written in C
