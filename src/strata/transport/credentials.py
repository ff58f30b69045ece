"""TLS credentials of servers and clients, and the token that a client sends."""

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
    """The token and certificates of a client. Fields that are not set are read from the environment."""

    token: str = ""
    """The token; default: STRATA_TOKEN."""
    token_file: str = ""
    """A file that contains only the token, read at each connection; default: STRATA_TOKEN_FILE."""
    ca: str = ""
    """The certificate authority that signed the coordinator's certificate, as a PEM file. Enables TLS. Default:
    STRATA_TLS_CA."""
    certificate: str = ""
    """The client certificate, if the coordinator requires one; default: STRATA_TLS_CERT."""
    key: str = ""
    """The private key of the client certificate; default: STRATA_TLS_KEY."""

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
        """Return the TLS context for a bare connection, or None without TLS."""
        ca, certificate, key = self._files()
        return client_context(ca, certificate, key) if ca else None

    def may_go_bare(self, address: str) -> bool:
        """Whether the token may be sent over a bare connection to `address`: only with TLS or to a Unix socket."""
        return bool(self._files()[0]) or address.startswith("unix:") or not self._token()

    def _files(self) -> tuple[str, str, str]:
        """Return the paths of the authority, certificate and key."""
        return (
            self.ca or os.environ.get(CA_VARIABLE, ""),
            self.certificate or os.environ.get(CERT_VARIABLE, ""),
            self.key or os.environ.get(KEY_VARIABLE, ""),
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata to send with every call and session."""
        token = self.current_token()
        return ((METADATA_KEY, bearer(token)),) if token else ()

    def current_token(self) -> str:
        """Return the current token, or an empty string without one."""
        token = self._token()
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError("the token contains a space or a character that tokens never contain; check its source")
        return token

    def _token(self) -> str:
        """Explicit settings take precedence over the environment."""
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
        raise ConfigError(f"cannot read {field}={path!r} ({error.strerror}); check the path", field=field) from error
