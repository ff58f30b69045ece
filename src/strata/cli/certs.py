"""`strata certs`: a working set of certificates for a test cluster."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer


def certs(
    directory: Annotated[Path, typer.Argument(help="Where to put them; made if it is not there.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address under which the coordinator is reached; repeat it.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long they are good.", min=1, max=3650)] = 365,
) -> None:
    """Make an authority, a server's and a client's certificate, and tokens, and say how to use them."""
    import secrets  # noqa: PLC0415

    from strata.transport.certificates import write_set  # noqa: PLC0415 (cryptography is behind it)

    files = write_set(directory, hosts=host or [], now=datetime.now(UTC), days=days)
    tokens = directory / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("".join(f"{role} {secrets.token_hex(32)}\n" for role in ("worker", "reader", "admin")))
    for path in [*files, tokens]:
        typer.echo(f"  {path}")
    typer.echo(
        f"\nCoordinator:  strata coordinator --listen 0.0.0.0:50051 --tls-cert {directory}/server.crt "
        f"--tls-key {directory}/server.key --tokens {tokens}\n"
        f"Clients:      CoordinatorClient('HOST:50051', tls_ca='{directory}/ca.crt', token=…), "
        "or STRATA_TLS_CA and STRATA_TOKEN in the environment"
    )
