"""The process that Monarch starts: it asks the fork server of its host for a fork, stands for it, and ends as it ends.

Run as a script by a bare interpreter (`python -I -S`), so that it takes milliseconds; hence only the standard library.
"""

import array
import json
import os
import socket

_FORK_SERVER_DIED = 1 << 8  # as a wait status: exit code 1


def main() -> None:
    fork_server = socket.socket(fileno=int(os.environ["LLAMARL_FORK_SERVER"]))
    ours, theirs = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if f"{name}{value}".isprintable()}
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2, theirs.fileno()]))
    fork_server.sendmsg([json.dumps({"type": "Launch", "environment": environment}).encode()], [rights])
    fork_server.close()
    theirs.close()
    status = ours.recv(4)
    end_as(int.from_bytes(status, "little") if status else _FORK_SERVER_DIED)


def end_as(status: int) -> None:
    """End with the signal or the exit code of the forked process."""
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    main()
