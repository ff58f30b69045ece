"""Uvicorn inside the coordinator's event loop, with TLS where the coordinator has it."""

from __future__ import annotations

import contextlib
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from strata.coordinator.http.connections import Connections, GuardedProtocol
from strata.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from strata.coordinator.config import SecurityConfig


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield  # signals are the coordinator's, not uvicorn's


def make_server(app: FastAPI, security: SecurityConfig) -> uvicorn.Server:
    """Refuses certificates that cannot be used now, rather than connections later."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        http=partial(GuardedProtocol, Connections()),  # type: ignore[arg-type]  # any factory will do
        ssl_certfile=security.certificate or None,
        ssl_keyfile=security.key or None,
        ssl_ca_certs=security.client_ca or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if security.client_ca else ssl.CERT_NONE,
    )
    try:
        config.load()
    except OSError as error:  # also ssl.SSLError
        raise ConfigError(
            f"the certificates in security cannot be used for HTTP: {error}; check certificate, key and client_ca",
            field="security.certificate",
        ) from error
    return Server(config)
