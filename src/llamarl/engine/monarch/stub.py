"""What Monarch starts as a process: it asks the nursery of its host for a fork, and then stands for it, ending as it ends.

Run as a script, by a bare interpreter (`python -I -S`), so that it costs milliseconds; hence the standard library only.
"""

import array
import json
import os
import socket

_NURSERY_DIED = 1 << 8  # as a wait status: exit code 1


def main() -> None:
    nursery = socket.socket(fileno=int(os.environ["LLAMARL_NURSERY"]))
    ours, theirs = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if f"{name}{value}".isprintable()}
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2, theirs.fileno()]))
    nursery.sendmsg([json.dumps({"type": "Launch", "environment": environment}).encode()], [rights])
    nursery.close()
    theirs.close()
    told = ours.recv(4)
    end_as(int.from_bytes(told, "little") if told else _NURSERY_DIED)


def end_as(status: int) -> None:
    """With the signal or the exit code of the one it stood for."""
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    main()
