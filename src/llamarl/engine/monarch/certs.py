"""Certificates of a cluster: an authority of its own, and for every host a key that it has signed.

A host that holds one may talk to all others (mutual TLS), and is trusted by them.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llamarl.engine.monarch.addresses import CA, CERTIFICATE, KEY
from llamarl.errors import InputError

AUTHORITY_KEY = "ca.key"
_SKEW = timedelta(hours=1)  # clocks of hosts differ


def make_certificates(folder: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Make one folder for each host below `folder`, to be copied to that host and no other. The authority of an earlier call
    is used again, so that hosts can be added."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for host in hosts:
        if Path(host).name != host or host in {"", "..", CA, AUTHORITY_KEY}:
            raise InputError(f"certs: '{host}' is no name or address of a host")
        if (folder / host).exists():
            raise InputError(f"certs: {folder / host} is there already; remove it to make a new one")
    authority = Authority.of(folder, days)
    return [authority.sign(host, folder / host, days) for host in hosts]


class Authority:
    """A certificate authority, which signs the key of each host."""

    def __init__(self, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def of(cls, folder: Path, days: int) -> Authority:
        """The authority in the folder, or a new one."""
        if not (folder / AUTHORITY_KEY).exists():
            key, name = generate_private_key(SECP256R1()), _name("llamarl cluster")
            built = _certificate(name, name, key, days, is_authority=True).sign(key, hashes.SHA256())
            _write(folder / CA, built.public_bytes(Encoding.PEM))
            _write(folder / AUTHORITY_KEY, _secret(key))
        try:
            found = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"certs: {folder} holds no authority that can be used: {error}") from None
        assert isinstance(found, EllipticCurvePrivateKey)
        return cls(certificate, found)

    def sign(self, host: str, folder: Path, days: int) -> Path:
        key = generate_private_key(SECP256R1())
        both_ways = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        built = (
            _certificate(_name(host), self._certificate.subject, key, days, is_authority=False)
            .add_extension(x509.SubjectAlternativeName([_alternative(host)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(both_ways), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(mode=0o700)
        _write(folder / CA, self._certificate.public_bytes(Encoding.PEM))
        _write(folder / CERTIFICATE, built.public_bytes(Encoding.PEM))
        _write(folder / KEY, _secret(key))
        return folder


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int, *, is_authority: bool
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _secret(key: EllipticCurvePrivateKey) -> bytes:
    data: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return data


def _write(path: Path, data: bytes) -> None:
    """Write a file that, from the start, only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
