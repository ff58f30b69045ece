"""Certificates for private clusters: their contents, the permissions of keys, and that no file is overwritten."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from strata.errors import ConfigError
from strata.transport.certificates import write_set

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_set(tmp_path / "certs", hosts=["coord.example", "10.0.0.7", "localhost"], now=NOW, days=30)
    return tmp_path / "certs"


def load(directory: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / f"{name}.crt").read_bytes())


def test_the_server_certificate_contains_every_host_and_this_machine(directory: Path) -> None:
    names = load(directory, "server").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "coord.example"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(a) for a in ("127.0.0.1", "::1", "10.0.0.7")
    ]


@pytest.mark.parametrize(
    ("name", "purpose"), [("server", ExtendedKeyUsageOID.SERVER_AUTH), ("client", ExtendedKeyUsageOID.CLIENT_AUTH)]
)
def test_each_certificate_is_signed_by_the_authority_for_one_purpose(
    directory: Path, name: str, purpose: x509.ObjectIdentifier
) -> None:
    certificate = load(directory, name)
    certificate.verify_directly_issued_by(load(directory, "ca"))
    assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_authority_can_sign_only_leaf_certificates(directory: Path) -> None:
    constraints = load(directory, "ca").extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)


def test_certificates_are_valid_from_just_before_now_for_the_given_days(directory: Path) -> None:
    certificate = load(directory, "server")
    assert certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
    assert certificate.not_valid_after_utc == NOW + timedelta(days=30)


def test_only_the_owner_can_read_keys(directory: Path) -> None:
    assert {p.stat().st_mode & 0o777 for p in directory.glob("*.key")} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700


def test_an_existing_file_is_never_overwritten(directory: Path) -> None:
    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    with pytest.raises(ConfigError, match=r"already contains ca\.crt, "):
        write_set(directory, hosts=[], now=NOW, days=1)
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
