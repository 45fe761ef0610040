"""A user's own function, named in the config as FILE.py:FUNCTION."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamarl.errors import ConfigError


def is_reference(name: str) -> bool:
    return ":" in name


def load_function(key: str, reference: str) -> Callable[..., Any]:
    """Import the file and return the function; every way to fail names the setting `key`."""
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser()
    if path.suffix != ".py" or not name:
        raise ConfigError(f"{key}: '{reference}' is neither a known name nor FILE.py:FUNCTION")
    if not path.is_file():
        raise ConfigError(f"{key}: no file {path}")
    function = getattr(_import(key, path), name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {path} has no function '{name}'")
    return function  # type: ignore[no-any-return]


def _import(key: str, path: Path) -> Any:
    module_name = f"llamarl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and typing look modules up there
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # so that it may import its neighbours; last, so that these hide nothing
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file is foreign code: whatever it raises becomes one line
        raise ConfigError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
