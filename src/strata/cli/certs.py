"""`strata certs`: a working set of certificates and tokens for a test cluster."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from strata.terminal import echo

PORT = 50051


def certs(
    directory: Annotated[Path, typer.Argument(help="Where to put them; made if it is not there.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address under which the coordinator is reached; repeat it.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long the certificates are good.", min=1, max=3650)] = 365,
) -> None:
    """Make an authority, a server's and a client's certificate, and tokens, and say how to use them.

    For test clusters and small ones. Where there is an authority already, use its certificates.
    """
    from strata.transport.certificates import write_set  # noqa: PLC0415 (cryptography is behind it)
    from strata.transport.tokens import write_tokens  # noqa: PLC0415

    hosts = host or []
    files = write_set(directory, hosts=hosts, now=datetime.now(UTC), days=days)
    files += write_tokens(directory)
    for path in files:
        echo(f"  {path}")
    echo("", *_recipe(directory, hosts[0] if hosts else "localhost"))


def _recipe(directory: Path, host: str) -> list[str]:
    here = directory.absolute()
    tls = f"--tls-cert {here}/server.crt --tls-key {here}/server.key"
    return [
        "Start the coordinator:",
        f"  strata coordinator --listen 0.0.0.0:{PORT} {tls} --tokens {here}/tokens",
        "Look at it:",
        f"  strata status --address {host}:{PORT} --tls-ca {here}/ca.crt --token-file {here}/reader.token",
        "For workers (copy ca.crt and worker.token to their machines; ca.key stays here):",
        f"  export STRATA_TLS_CA={here}/ca.crt STRATA_TOKEN_FILE={here}/worker.token",
    ]
