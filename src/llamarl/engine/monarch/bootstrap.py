"""The commands by which Monarch starts processes on a host. The worker's environment has the paths, which differ by host."""

from __future__ import annotations

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

from llamarl.engine.monarch.fork_server import RANK
from llamarl.engine.monarch.worker import IN_ORDER, PYTHON, STUB


def bare_command() -> BootstrapCommand:
    """A fresh interpreter, without torch."""
    return _shell(f'exec "${PYTHON}" -m monarch._src.actor.bootstrap_main', {})


def forked_command(name: str) -> BootstrapCommand:
    """A stub, for which the fork server forks the real process."""
    return _shell(f'exec "${PYTHON}" -I -S "${STUB}"', {RANK: name})


def _shell(command: str, environment: dict[str, str]) -> BootstrapCommand:
    return BootstrapCommand("/bin/sh", None, ["-c", command], {IN_ORDER: "true", **environment})
