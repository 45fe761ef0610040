"""A job that workers can join, and workers that join it, driven by hand: no Monarch, no executors."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from helpers.processes import wait_until
from llamarl import __version__
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.engine.monarch.join_protocol import AnyJoinMessage, JoinConnection, JoinConnectionClosed, JoinRequest
from llamarl.engine.monarch.joined_hosts import JoinedHosts

PATIENCE_S = 10.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


class FakeHost:
    """What the engine knows of a host, without a host."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name


class JoinableJob:
    """The part of a job that workers join, driven by hand."""

    def __init__(self, *settings: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.config: Config = load_config(
            None, ["engine=monarch", "engine.hosts=[127.0.0.1:1]", f"engine.join={self.address}", *settings]
        )
        self.left: list[tuple[str, list[str], str]] = []
        self.hosts: Any = JoinedHosts(
            self.config,
            default_line(self.config).group_roles[0],
            FakeHost,  # type: ignore[arg-type]
            lambda host, executors, reason: self.left.append((host.name, executors, reason)),
        )

    def until(self, condition: Callable[[], object]) -> None:
        def look() -> object:
            self.hosts.advance()
            return condition()

        assert wait_until(look, PATIENCE_S)

    def reach(self, address: str) -> list[str]:
        """The host answers its first heartbeat."""
        self.until(lambda: any(host.name == address for host in self.hosts.hosts))
        found: list[str] = self.hosts.welcome(next(host for host in self.hosts.hosts if host.name == address))
        return found


def next_message(connection: JoinConnection, of: JoinableJob | None = None) -> AnyJoinMessage:
    """The next message that arrives; the job, if given, goes on meanwhile."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if of is not None:
            of.hosts.advance()
        if found := connection.receive():
            return found[0]
    raise AssertionError(f"no message within {PATIENCE_S:g} s")


@contextmanager
def joinable_job(*settings: str) -> Iterator[JoinableJob]:
    found = JoinableJob(*settings)
    try:
        yield found
    finally:
        found.hosts.close()


class FakeWorker:
    """A worker's connection, driven by hand."""

    def __init__(self, found: JoinableJob) -> None:
        host, port = found.address.split(":")
        self.connection = JoinConnection(socket.create_connection((host, int(port))))

    def offer(self, address: str, worker: str = "first", gpus: int = 0, replicas: int = 0) -> None:
        self.connection.send(JoinRequest(__version__, address, worker, gpus, replicas))

    def hear(self, of: JoinableJob | None = None) -> AnyJoinMessage:
        return next_message(self.connection, of)

    def is_cut_off(self) -> bool:
        try:
            return wait_until(lambda: self.connection.receive() and False, PATIENCE_S)
        except JoinConnectionClosed:
            return True
