"""`strata certs`: create certificates and tokens for a test cluster."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from strata.terminal import echo

PORT = 50051


def certs(
    directory: Annotated[Path, typer.Argument(help="Directory for the files; created if it does not exist.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Host name or address at which clients reach the coordinator. Repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(help="Days until the certificates expire.", min=1, max=3650)] = 365,
) -> None:
    """Create certificates and tokens for a test cluster.

    Writes a certificate authority (CA), a server and a client certificate, and
    one token per role, and prints the commands that use them. If your
    organization runs a CA, use certificates from that CA instead.
    """
    from strata.transport.certificates import write_set  # noqa: PLC0415 (imports cryptography)
    from strata.transport.tokens import write_tokens  # noqa: PLC0415

    hosts = host or []
    files = write_set(directory, hosts=hosts, now=datetime.now(UTC), days=days)
    files += write_tokens(directory)
    for path in files:
        echo(f"  {path}")
    echo("", *_usage(directory, hosts[0] if hosts else "localhost"))


def _usage(directory: Path, host: str) -> list[str]:
    here = directory.absolute()
    tls = f"--tls-cert {here}/server.crt --tls-key {here}/server.key"
    return [
        "Start the coordinator:",
        f"  strata coordinator --listen 0.0.0.0:{PORT} {tls} --tokens {here}/tokens",
        "Check that it answers:",
        f"  strata status --address {host}:{PORT} --tls-ca {here}/ca.crt --token-file {here}/reader.token",
        "Configure the workers (copy ca.crt and worker.token to their machines; keep ca.key here):",
        f"  export STRATA_TLS_CA={here}/ca.crt STRATA_TOKEN_FILE={here}/worker.token",
    ]
