"""A certificate authority for development: files in one folder, by the package cryptography."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from escrowmq.errors import Code, Misuse

_FROM = datetime.timedelta(hours=1)
"""How far in the past certificates begin, for clocks that differ."""


class Authority:
    """The authority of a folder: loaded from ``ca.pem`` and ``ca.key``, or created there. Raises
    Misuse(BAD_ARGUMENT)."""

    def __init__(self, folder: Path, days: int) -> None:
        self._folder, self._days = folder, days
        certificate, key = folder / "ca.pem", folder / "ca.key"
        if certificate.exists() or key.exists():
            try:
                self._certificate = x509.load_pem_x509_certificate(certificate.read_bytes())
                loaded = serialization.load_pem_private_key(key.read_bytes(), None)
                if not isinstance(loaded, ec.EllipticCurvePrivateKey):
                    raise ValueError("it is not an elliptic-curve key")
            except (OSError, ValueError, TypeError) as problem:
                raise Misuse(Code.BAD_ARGUMENT, f"{certificate} and {key} are no authority: {problem}") from None
            self._key = loaded
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "EscrowMQ development authority")])
        constraints = [(x509.BasicConstraints(True, 0), True)]
        self._certificate = self._sign(name, name, self._key.public_key(), 3650, constraints)
        _write(key, _pem(self._key), 0o600)
        _write(certificate, self._certificate.public_bytes(serialization.Encoding.PEM), 0o644)

    def issue(self, file: str, names: Sequence[str], *, client: bool = False) -> None:
        """Write ``FILE.pem`` and ``FILE.key`` for these names; existing ones are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        purpose = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.SubjectAlternativeName([_general_name(name) for name in names]), False),
            (x509.ExtendedKeyUsage([purpose]), False),
        ]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        certificate = self._sign(subject, self._certificate.subject, key.public_key(), self._days, extensions)
        _write(self._folder / f"{file}.key", _pem(key), 0o600)
        _write(self._folder / f"{file}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)

    def _sign(
        self,
        subject: x509.Name,
        issuer: x509.Name,
        key: ec.EllipticCurvePublicKey,
        days: int,
        extensions: Sequence[tuple[x509.ExtensionType, bool]],
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _FROM)
            .not_valid_after(now + datetime.timedelta(days=days))
        )
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, is_critical)
        return builder.sign(self._key, hashes.SHA256())


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file whole, so that a broker never loads half of it."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(descriptor, "wb") as opened:
        opened.write(content)
    os.chmod(temporary, mode)
    os.replace(temporary, path)
