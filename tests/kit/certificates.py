"""A certificate authority for tests, and the certificates that it signs."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LIFETIME = timedelta(days=30)


class Pair(NamedTuple):
    """The files of a certificate and of its key, and one file with both, as a broker takes it."""

    certificate: Path
    key: Path
    both: Path


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class Authority:
    """Writes its files into `folder`; `certificate` is what clients and brokers trust."""

    def __init__(self, folder: Path, name: str = "ca", lifetime: timedelta = _LIFETIME) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._own = self._signed(self._name, self._key, lifetime, x509.BasicConstraints(ca=True, path_length=None))
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(_pem(self._own))

    def issue(
        self, common: str, *, hosts: Sequence[str] = (), lifetime: timedelta = _LIFETIME, file: str | None = None
    ) -> Pair:
        """A new certificate for `common` and its hosts, in files named `file`. A negative lifetime: expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_host(host) for host in hosts]
        extension = x509.SubjectAlternativeName(names) if names else x509.BasicConstraints(ca=False, path_length=None)
        certificate = self._signed(_name(common), key, lifetime, extension)
        written = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pair = Pair(*(self._folder / f"{file or common}.{kind}" for kind in ("crt", "key", "pem")))
        for path, content in zip(pair, (_pem(certificate), written, written + _pem(certificate)), strict=True):
            path.write_bytes(content)
        return pair

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, lifetime: timedelta, extension: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _LIFETIME - timedelta(days=1))
            .not_valid_after(now + lifetime)
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(self._key, hashes.SHA256())
        )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
