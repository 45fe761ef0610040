"""Runs a command without some system calls: they fail with "not implemented", as on old kernels.

python -m helpers.without CALL[=ERRNO],... COMMAND ...
"""

from __future__ import annotations

import os
import struct
import sys

from llamarl.tasks.sandbox.seccomp import give_up_privileges, install
from llamarl.tasks.sandbox.syscalls import numbers

_OTHERS = {"unshare": {"x86_64": 272, "aarch64": 97}}
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _NOT_IMPLEMENTED = 0x7FFF0000, 0x00050000 | 38


def take_away(names: list[str]) -> None:
    machine = os.uname().machine
    program = [(_LOAD, 0, 0, 0)]
    for name in names:
        number = _OTHERS[name][machine] if name in _OTHERS else numbers(machine)[name]
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOT_IMPLEMENTED)]
    program.append((_RETURN, 0, 0, _ALLOW))
    give_up_privileges()
    install(b"".join(struct.pack("<HBBI", *line) for line in program))


if __name__ == "__main__":
    take_away(sys.argv[1].split(","))
    os.execv(sys.argv[2], sys.argv[2:])
