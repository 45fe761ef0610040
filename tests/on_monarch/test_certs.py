"""Certificates of a cluster: both sides show one, of the same authority, for the right host; nobody else reads the keys."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.cli import llamarl
from helpers.joining import joinable_job, next_message

from llamarl import __version__
from llamarl.engine.monarch.join_client import JoinClient
from llamarl.engine.monarch.join_protocol import JoinConnectionClosed, JoinRefused, JoinRequest
from llamarl.errors import InputError

pytestmark = pytest.mark.skipif(find_spec("cryptography") is None, reason="needs the extra `monarch`")


def make(folder: Path, *hosts: str) -> list[Path]:
    from llamarl.engine.monarch.certs import make_certificates

    return make_certificates(folder, hosts, days=1)


def shake_hands(server: Path, client: Path, name: str) -> bool:
    """Mutual TLS between two ends of a socket pair."""
    listening, calling = socket.socketpair()
    contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)]
    for context, folder in zip(contexts, (server, client), strict=True):
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.load_verify_locations(folder / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
    outcomes: list[bool] = []

    def end(shake: Callable[[], ssl.SSLSocket]) -> None:
        try:
            with shake() as connection:
                connection.sendall(b"x")
                outcomes.append(connection.recv(1) == b"x")
        except (ssl.SSLError, ConnectionError):
            outcomes.append(False)
            listening.close()
            calling.close()

    answer = threading.Thread(target=end, args=(lambda: contexts[0].wrap_socket(listening, server_side=True),))
    answer.start()
    end(lambda: contexts[1].wrap_socket(calling, server_hostname=name))
    answer.join()
    return all(outcomes)


def test_hosts_of_one_cluster_trust_each_other_and_no_other(tmp_path: Path) -> None:
    one, named = make(tmp_path / "ours", "10.0.0.1", "gpu-7.example")
    (added,) = make(tmp_path / "ours", "10.0.0.3")
    (foreign,) = make(tmp_path / "theirs", "10.0.0.1")
    assert shake_hands(one, named, "10.0.0.1") and shake_hands(named, one, "gpu-7.example")
    assert shake_hands(added, one, "10.0.0.3"), "a host that was added later"
    assert not shake_hands(one, named, "10.0.0.9"), "another host's certificate"
    assert not shake_hands(one, foreign, "10.0.0.1") and not shake_hands(foreign, one, "10.0.0.1")


def test_keys_are_for_their_owner_alone_and_are_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    done = llamarl("certs", folder, "10.0.0.1")
    assert done.code == 0 and "keep it off the hosts" in done.out
    assert not [path for path in folder.rglob("*") if path.stat().st_mode & 0o077]
    assert not (folder / "10.0.0.1" / "ca.key").exists()
    with pytest.raises(InputError, match="is there already; remove it to make a new one"):
        make(folder, "10.0.0.1")
    with pytest.raises(InputError, match="is no name or address of a host"):
        make(folder, "../escape")


def test_only_hosts_of_the_cluster_can_ask_to_join_and_only_for_themselves(tmp_path: Path) -> None:
    (own,), (foreign,) = make(tmp_path / "ours", "127.0.0.1"), make(tmp_path / "foreign", "127.0.0.1")
    with joinable_job(f"engine.certs={own}") as found:
        for certs in ("", str(foreign)):
            client = JoinClient(found.address, certs, listen="127.0.0.1:11", count_gpus=int, replicas=0)
            with pytest.raises((JoinConnectionClosed, OSError)), client._connected() as connection:
                connection.send(JoinRequest(__version__, "127.0.0.1:11", "w", 0))
                while True:
                    connection.receive()
        client = JoinClient(found.address, str(own), listen="127.0.0.1:11", count_gpus=int, replicas=0)
        with client._connected() as connection:
            connection.send(JoinRequest(__version__, "127.0.0.2:11", "w", 0))
            told = JoinRefused("its certificate is for 127.0.0.1, and it listens at 127.0.0.2:11")
            assert next_message(connection, found) == told
        with client._connected() as connection:
            connection.send(JoinRequest(__version__, "127.0.0.1:11", "w", 0))
            assert found.reach("127.0.0.1:11") == ["generator/1"]
