"""Create certificates for a private cluster: a certificate authority, a server and a client certificate.

Meant for test clusters and small clusters. If your organisation has a certificate authority, use its certificates: the
coordinator only needs the files.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from pathlib import Path

SERVER_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Always included in the server certificate, so that clients on the same machine can connect."""


@dataclass(frozen=True, slots=True)
class Issued:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def issue_authority(*, now: datetime, days: int) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Strata test authority")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(name, name, key, now=now, days=days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Issued(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Issued, common_name: str, *, hosts: Sequence[str], now: datetime, days: int) -> Issued:
    """Issue a server certificate (if `hosts` is not empty) or a client certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    issuer = authority.certificate
    builder = (
        _builder(_name(common_name), issuer.subject, key, now=now, days=days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
        )
    return Issued(builder.sign(authority.key, hashes.SHA256()), key)


def write_set(directory: Path, *, hosts: Sequence[str], now: datetime, days: int) -> list[Path]:
    """Write a complete set of certificates into a directory and return the paths; never overwrite a file."""
    authority = issue_authority(now=now, days=days)
    made = {
        "ca": authority,
        "server": issue(
            authority, "strata coordinator", hosts=list(dict.fromkeys([*SERVER_HOSTS, *hosts])), now=now, days=days
        ),
        "client": issue(authority, "strata client", hosts=(), now=now, days=days),
    }
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {f"{name}.{kind}": pem(issued, kind) for name, issued in made.items() for kind in ("crt", "key")}
    existing = [name for name in files if (directory / name).exists()]
    if existing:
        raise ConfigError(
            f"{directory} already contains {', '.join(existing)}; choose another directory, or remove them",
            field="directory",
        )
    for name, content in files.items():
        mode = 0o600 if name.endswith(".key") else 0o644
        fd = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
    return [directory / name for name in files]


def pem(issued: Issued, kind: str) -> bytes:
    """Return the certificate (`crt`) or the private key (`key`) as PEM."""
    if kind == "crt":
        return issued.certificate.public_bytes(serialization.Encoding.PEM)
    return issued.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # other machines' clocks may be behind
        .not_valid_after(now + timedelta(days=days))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
