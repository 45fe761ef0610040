"""How Monarch starts the processes of a host: in the worker's own words, since paths may differ from host to host."""

from __future__ import annotations

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

from llamarl.engine.monarch.fork_server import RANK
from llamarl.engine.monarch.worker import IN_ORDER, PYTHON, STUB


def bare_command() -> BootstrapCommand:
    """A fresh interpreter, without torch."""
    return _shell(f'exec "${PYTHON}" -m monarch._src.actor.bootstrap_main', {})


def forked_command(name: str) -> BootstrapCommand:
    """A stub, in whose name the nursery forks."""
    return _shell(f'exec "${PYTHON}" -I -S "${STUB}"', {RANK: name})


def _shell(line: str, environment: dict[str, str]) -> BootstrapCommand:
    return BootstrapCommand("/bin/sh", None, ["-c", line], {IN_ORDER: "true", **environment})
