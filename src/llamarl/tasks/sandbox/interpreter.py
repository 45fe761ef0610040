"""The Python that runs programs: which one it is, what it must be able to read, and the code that starts a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable

from msgspec import Struct

from llamarl.errors import ConfigError

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
_LOADER_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_QUERY = """
import json, os, sys, sysconfig
paths = sysconfig.get_paths()
found = [paths["stdlib"], paths["platstdlib"], sysconfig.get_config_var("LIBDIR") or "", *sys.path]
print(json.dumps([os.path.realpath(sys.executable), *found]))
"""
_START_S = 30.0

# The program is passed over a descriptor, since behind the walls there may be no file to hold it.
_PROGRAM, _RESULTS = 3, 4
# `site` defines exit() and quit(), but our own interpreter starts without it.
_EXITS = """
import builtins, sys
builtins.exit = builtins.quit = sys.exit
"""
RUN = f"""{_EXITS}
import os
with os.fdopen({_PROGRAM}, "rb") as file:
    source = file.read()
os.close({_RESULTS})
code = compile(source, "program.py", "exec")
del builtins, sys, os, file, source
exec(code, globals())
"""
# Results are written as JSON after the run's nonce. Expected values are not here, so the program cannot cheat with them.
# The program is in sys.modules, since dataclasses look there. A program that exits with 0 can still be called.
CALL = f"""{_EXITS}
import json, os, types
with os.fdopen({_PROGRAM}, "rb") as file:
    asked = json.load(file)
sys.modules["program"] = module = types.ModuleType("program")
space = module.__dict__
try:
    exec(compile(asked["source"], "program.py", "exec"), space)
except SystemExit as end:
    if end.code not in (None, 0):
        raise
results = [space[call["call"]](*call["args"], **call["kwargs"]) for call in asked["calls"]]
with os.fdopen({_RESULTS}, "w") as file:
    file.write(asked["nonce"] + json.dumps(results))
"""


class Interpreter(Struct, frozen=True):
    """A Python and the files that it needs."""

    command: tuple[str, ...]
    roots: tuple[str, ...]  # folders and files that programs may read: real paths, none inside another

    @property
    def executable(self) -> str:
        return self.command[0]


def find_interpreter(path: str) -> Interpreter:
    """Return our own Python without its installed packages, or the Python at `path` with all that it has."""
    command = _resolve_folder(os.path.expanduser(path)) if path else os.path.realpath(sys.executable)
    options = ("-I", "-B", "-X", "utf8") if path else ("-I", "-B", "-X", "utf8", "-S")
    try:
        done = subprocess.run([command, *options, "-c", _QUERY], capture_output=True, timeout=_START_S, check=True)
        found: list[str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"sandbox.python: {command} cannot be asked where its modules are: {error}") from None
    environment = os.path.join(os.path.dirname(os.path.dirname(command)), "pyvenv.cfg")
    real = [os.path.realpath(place) for place in (*_LIBRARIES, *_LOADER_FILES, *found, environment) if place]
    return Interpreter((command, *options), _outermost([command, *real]))


def _resolve_folder(path: str) -> str:
    """Resolve links in the folder only: a virtual environment's interpreter is itself a link and finds modules beside it."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for path in sorted({path for path in paths if os.path.exists(path)}):
        if path != "/" and not any(path.startswith(other + os.sep) for other in kept):
            kept.append(path)
    return tuple(kept)


def devices() -> tuple[str, ...]:
    """Return the devices that programs may use."""
    return tuple(path for path in _DEVICES if os.path.exists(path))
