"""Addresses of hosts, and which may be listened on: beyond loopback only with certificates."""

from __future__ import annotations

import socket
from pathlib import Path

from llamarl.config.engine import is_loopback
from llamarl.errors import InputError

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
_FOR_MONARCH = {"HYPERACTOR_TLS_CA": CA, "HYPERACTOR_TLS_CERT": CERTIFICATE, "HYPERACTOR_TLS_KEY": KEY}


def split_address(key: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"{key}: expected HOST:PORT, such as 10.0.0.2:2700, got '{address}'")
    return host.strip("[]"), int(port)


def url_of(key: str, address: str, certs: str) -> str:
    """The address as Monarch writes it. Without certificates, only addresses of this machine are allowed."""
    host, port = split_address(key, address)
    if certs:
        return f"tls://{host}:{port}"
    if not is_loopback(host):
        raise InputError(
            f"{key}: {address} is beyond this machine, and whoever reaches a worker can run programs there; "
            "`llamarl certs` makes certificates for a cluster, which --certs or engine.certs then names"
        )
    return f"tcp://{host}:{port}"


def certificate_variables(key: str, certs: str) -> dict[str, str]:
    """Environment variables that tell Monarch where the certificates are; it has no other way."""
    folder = Path(certs).expanduser()
    for name in _FOR_MONARCH.values():
        if not (folder / name).is_file():
            raise InputError(f"{key}: {folder} holds no {name}; `llamarl certs` makes a folder for every host")
    return {variable: str((folder / name).resolve()) for variable, name in _FOR_MONARCH.items()}


def own_address(towards: str) -> str:
    """The address under which a host can reach this machine, as the kernel chooses it. Nothing is sent."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        found: str = probe.getsockname()[0]
    return found
