"""Programs that try to get a reward for nothing, to escape, or to break things. None of them solves the problem, which is to
print the SHA-256 of the input (or to return it from `digest`). They are in `tests/data/hostile_programs.txt`."""

from __future__ import annotations

import re
from pathlib import Path

_FILE = Path(__file__).parents[1] / "data" / "hostile_programs.txt"
_HEAD = re.compile(r"^=== (\w+)( raw)?: (.+)$", re.MULTILINE)
# Prefix of programs that search for the answer: helpers that print any hash they find.
_SEARCH = """
import re
def show(data):
    if isinstance(data, str):
        data = data.encode(errors="replace")
    for found in set(re.findall(rb"[0-9a-f]{64}", data)):
        print(found.decode())
def look(path):
    try:
        with open(path, "rb") as file:
            show(file.read())
    except OSError:
        pass
"""
# Prefix of programs that make system calls by number, for x86_64 and aarch64.
_RAW = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def call(x86, arm, *args):
    return libc.syscall(x86 if X86 else arm, *args)
"""
_UNWRITABLE = {
    "is no Python": "this is not a program\n\x00\x01\x02",
    "is deep": "print(" + "(" * 3000 + ")" * 3000 + ")",
    "is long": "x = 1\n" * 20000 + "print(x)",
    "is a string of half characters": "print('\ud800\udfff')",
}


def _read() -> dict[str, dict[str, str]]:
    """Maps each kind to its programs by name."""
    found: dict[str, dict[str, str]] = {"forging": dict(_UNWRITABLE)}
    parts = _HEAD.split(_FILE.read_text())[1:]
    for kind, raw, name, text in zip(*(iter(parts),) * 4, strict=True):
        before = (_SEARCH if kind == "finding" else "") + (_RAW if raw else "")
        found.setdefault(kind, {})[name] = before + text
    return found


_BY_KIND = _read()
FORGING = tuple(_BY_KIND["forging"])
# Names of programs that take time begin like this; the others fail or succeed at once.
_SLOW = ("races", "looks", "reads every")
QUICK = (*_BY_KIND["reaching"], *(name for name in _BY_KIND["finding"] if not name.startswith(_SLOW)))


def hostile_programs() -> dict[str, str]:
    return {name: text for programs in _BY_KIND.values() for name, text in programs.items()}
