"""Several hosts on one machine: network namespaces with their own addresses, joined by a bridge. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

PORT = 2700
_INTERFACE = "eth0"  # name of the network interface on every host


def ip(*args: object) -> str:
    return subprocess.run(["ip", *map(str, args)], check=True, capture_output=True, text=True).stdout


class ClusterHost:
    """One namespace, with a worker in it while it is alive."""

    def __init__(self, name: str, address: str, certs: Path, environment: Mapping[str, str], log: Path) -> None:
        self.name, self.address, self._certs = name, f"{address}:{PORT}", certs
        self._environment, self._log = environment, log
        self._worker: subprocess.Popen[bytes] | None = None

    @property
    def enter(self) -> tuple[str, ...]:
        """The beginning of a command that runs on this host."""
        return "ip", "netns", "exec", self.name

    def start(self, *, certs: Path | None = None, join: str = "", environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "llamarl.cli", "worker", "--listen", self.address]
        command += ["--join", join] if join else []
        with self._log.open("ab") as log:
            self._worker = subprocess.Popen(
                [*self.enter, *command, "--certs", str(certs or self._certs)],
                env={**os.environ, **self._environment, **(environment or {})},
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """Kill all its processes at once, like a power cut."""
        self._signal(signal.SIGKILL)
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()

    def leave(self) -> int:
        """Ask the worker to end; returns its exit code."""
        assert self._worker is not None
        self._worker.terminate()
        return self._worker.wait(timeout=30)

    def exit_code(self) -> int | None:
        """Exit code of the worker; None while it runs."""
        assert self._worker is not None
        return self._worker.poll()

    @property
    def said(self) -> str:
        """Everything that its workers have printed."""
        return self._log.read_text()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def cut_off(self) -> None:
        ip("link", "set", f"v{self.name}", "down")

    def reconnect(self) -> None:
        ip("link", "set", f"v{self.name}", "up")

    @property
    def processes(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Cluster:
    def __init__(
        self, folder: Path, hosts: list[ClusterHost], certs: Path, own: str, interface: str = _INTERFACE
    ) -> None:
        self.folder, self.hosts, self.certs, self._interface = folder, hosts, certs, interface
        self.own = own  # address of the job itself

    @property
    def settings(self) -> list[str]:
        return [
            "engine=monarch",
            f"engine.certs={self.certs}",
            f"engine.trusted_network={self._interface}",
            "engine.host_s=3",
        ]


@contextmanager
def cluster(folder: Path, num_hosts: int, environment: Mapping[str, str]) -> Iterator[Cluster]:
    """Make hosts with workers. The job itself runs outside the namespaces, at the bridge's address."""
    number = os.getpid() % 200 + 20  # several clusters may run at once
    bridge, net = f"llr{number}", f"10.{number}.0"
    addresses = [f"{net}.{index + 1}" for index in range(num_hosts + 1)]
    from llamarl.engine.monarch.certs import make_certificates

    own, *certs = make_certificates(folder / "certs", addresses, days=1)
    hosts = [
        ClusterHost(f"{bridge}h{index}", address, cert, environment, folder / f"host{index}.log")
        for index, (address, cert) in enumerate(zip(addresses[1:], certs, strict=True))
    ]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{addresses[0]}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for host, address in zip(hosts, addresses[1:], strict=True):
            _join(host.name, address, bridge)
        yield Cluster(folder, hosts, own, addresses[0])
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                host.kill()
                ip("netns", "del", host.name)
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", bridge)


def _join(name: str, address: str, bridge: str) -> None:
    ip("netns", "add", name)
    ip("link", "add", f"v{name}", "type", "veth", "peer", "name", _INTERFACE, "netns", name)
    ip("link", "set", f"v{name}", "master", bridge, "up")
    ip("-n", name, "addr", "add", f"{address}/24", "dev", _INTERFACE)
    for interface in (_INTERFACE, "lo"):
        ip("-n", name, "link", "set", interface, "up")
