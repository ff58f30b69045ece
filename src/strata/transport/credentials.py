"""TLS for both ends of a gRPC connection, and what a client brings along."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from strata.errors import ConfigError
from strata.transport.frames import client_context
from strata.transport.tokens import METADATA_KEY, TOKEN_VARIABLE, bearer

if TYPE_CHECKING:
    import ssl

    from strata.transport.channels import Options

CA_VARIABLE = "STRATA_TLS_CA"
CERT_VARIABLE = "STRATA_TLS_CERT"
KEY_VARIABLE = "STRATA_TLS_KEY"
TOKEN_FILE_VARIABLE = "STRATA_TOKEN_FILE"  # noqa: S105 - a name, not a secret


def server_credentials(certificate: str, key: str, client_ca: str) -> grpc.ServerCredentials:
    pair = (_read(key, "security.key"), _read(certificate, "security.certificate"))
    authority = _read(client_ca, "security.client_ca") if client_ca else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=bool(client_ca))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurity:
    """What a client shows, and whom it believes. What is not given comes from the environment."""

    token: str = ""
    """Or STRATA_TOKEN."""
    token_file: str = ""
    """A file that holds the token alone, or STRATA_TOKEN_FILE; read again at each connection."""
    ca: str = ""
    """The authority that signed the coordinator's certificate, a PEM file, or STRATA_TLS_CA; given: TLS is used."""
    certificate: str = ""
    """Of this client, where the coordinator asks for one, or STRATA_TLS_CERT."""
    key: str = ""
    """Its private key, or STRATA_TLS_KEY."""

    def __repr__(self) -> str:
        return f"ClientSecurity(token={'…' if self.token else None}, ca={self.ca!r})"

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        ca, certificate, key = self._files()
        if not ca:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(
            _read(ca, "ca"),
            _read(key, "key") if key else None,
            _read(certificate, "certificate") if certificate else None,
        )
        return grpc.aio.secure_channel(address, credentials, options=options)

    def tls_context(self) -> ssl.SSLContext | None:
        """For a bare connection; None: without TLS."""
        ca, certificate, key = self._files()
        return client_context(ca, certificate, key) if ca else None

    def may_go_bare(self, told: str) -> bool:
        """Whether a bare connection is as safe as gRPC: a token is not shown to whoever may be at that port."""
        return bool(self._files()[0]) or told.startswith("unix:") or not self._token()

    def _files(self) -> tuple[str, str, str]:
        """Authority, certificate and key."""
        return (
            self.ca or os.environ.get(CA_VARIABLE, ""),
            self.certificate or os.environ.get(CERT_VARIABLE, ""),
            self.key or os.environ.get(KEY_VARIABLE, ""),
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To be sent with every call and session."""
        token = self.current_token()
        return ((METADATA_KEY, bearer(token)),) if token else ()

    def current_token(self) -> str:
        """As it is now; empty: there is none."""
        token = self._token()
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError("the token holds a space or another character that none has; check where it comes from")
        return token

    def _token(self) -> str:
        """What was said here wins over the environment."""
        if self.token:
            return self.token
        if self.token_file:
            return _read(self.token_file, "token_file").decode(errors="replace").strip()
        if token := os.environ.get(TOKEN_VARIABLE, ""):
            return token
        path = os.environ.get(TOKEN_FILE_VARIABLE, "")
        return _read(path, TOKEN_FILE_VARIABLE).decode(errors="replace").strip() if path else ""


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}={path!r} cannot be read ({error.strerror}); check the path", field=field) from error
