"""Checks of the engine's settings before anything starts. They do not need Monarch, which is an optional extra.

Monarch reads its environment once, when it is imported. So everything that it must be told that way is set here, before.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from llamarl.config import EngineConfig
from llamarl.engine.monarch.addresses import certificate_variables, split_address, url_of
from llamarl.errors import ConfigError

ANY_ADDRESS = ("0.0.0.0", "::")
_ENVIRONMENT = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",  # between its checks whether processes live; 10 s by default
    # A message that is not delivered for so long (30 s by default) closes the way to its address for good: a worker that is
    # started there again could never be reached.
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "365d",
    # Monarch takes a process for dead whose answer is late (after 30 s by default) or was lost. Whether one lives is told by
    # the agent of its host, and how long it may be silent by `engine.silence_s`.
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "365d",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "365d",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "1095d",  # must be longer than both together
    "MONARCH_FILE_LOG": "error",  # level of its log in the shared temporary folder; info by default
}


def check_installed(key: str, package: str = "monarch") -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{key}: needs {package}, which is not installed; pip install 'llamarl[monarch]'")


def check_engine(settings: EngineConfig) -> None:
    if settings.kind != "monarch":
        return
    if settings.join:
        _check_join(settings)
    for host in settings.all_hosts:
        url_of("engine.hosts", host.address, settings.certs)
    check_installed("engine")
    prepare_environment("engine.certs", settings.certs)


def _check_join(settings: EngineConfig) -> None:
    url_of("engine.join", settings.join, settings.certs)
    if not settings.hosts:
        raise ConfigError(
            "engine.join: needs engine.hosts, since weights must be able to leave this machine; name at least one worker, "
            "for example one on this machine"
        )
    if split_address("engine.join", settings.join)[0] in ANY_ADDRESS:
        raise ConfigError(
            "engine.join: name the address at which other hosts reach this machine, not all of its addresses"
        )


def prepare_environment(key: str, certs: str) -> None:
    """Set what Monarch reads, for this process and its children."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    wanted = certificate_variables(key, certs) if certs else {}
    if any(os.environ.get(name) != value for name, value in wanted.items()) and "monarch" in sys.modules:
        raise ConfigError(f"{key}: Monarch was imported before, and reads which certificates to use only then")
    os.environ.update(wanted)
