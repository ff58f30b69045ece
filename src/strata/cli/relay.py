"""`strata relay`: serve the workers of one node over one connection to the coordinator."""

from typing import TYPE_CHECKING, Annotated

import typer

from strata.terminal import echo, echo_json

if TYPE_CHECKING:
    from strata.coordinator.relay.relay import RelayAddresses


def relay(
    upstream: Annotated[
        str,
        typer.Option(help="The coordinator or another relay: HOST:PORT or unix:PATH; leader and standbys with commas."),
    ],
    listen: Annotated[
        str, typer.Option(help="Where to serve the node's workers: HOST:PORT or unix:PATH; port 0 picks one.")
    ] = "127.0.0.1:50052",
    tokens: Annotated[str, typer.Option(help="File of the tokens that workers must show, lines of ROLE TOKEN.")] = "",
    tls_cert: Annotated[str, typer.Option(help="This relay's certificate, a PEM file.")] = "",
    tls_key: Annotated[str, typer.Option(help="Its private key, a PEM file.")] = "",
    tls_client_ca: Annotated[str, typer.Option(help="Authority of the certificates that workers must show.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve any address without tokens and TLS.")] = False,
    upstream_ca: Annotated[
        str, typer.Option(help="Authority of the coordinator's certificate; turns TLS on. Or STRATA_TLS_CA.")
    ] = "",
    upstream_cert: Annotated[
        str, typer.Option(help="What this relay shows to the coordinator. Or STRATA_TLS_CERT.")
    ] = "",
    upstream_key: Annotated[str, typer.Option(help="Its private key. Or STRATA_TLS_KEY.")] = "",
    timeout_s: Annotated[
        float, typer.Option(help="How long to look for the coordinator at start, before giving up.", min=0.1)
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one line of JSON.")] = False,
) -> None:
    """Serve a node's workers: the coordinator's service, over one connection to it.

    Workers use it as they would use the coordinator. The token for the coordinator comes from STRATA_TOKEN or
    STRATA_TOKEN_FILE. It stops on Ctrl-C or SIGTERM.
    """
    from strata.coordinator.client import ClientConfig  # noqa: PLC0415 (grpc is behind it)
    from strata.coordinator.config import SecurityConfig  # noqa: PLC0415
    from strata.coordinator.relay.relay import RelayConfig, run  # noqa: PLC0415
    from strata.transport.credentials import ClientSecurity  # noqa: PLC0415

    downstream = SecurityConfig(
        certificate=tls_cert, key=tls_key, client_ca=tls_client_ca, tokens=tokens, insecure=insecure
    )
    run(
        RelayConfig(
            upstream=upstream,
            listen=listen,
            security=downstream,
            client=ClientConfig(connect_timeout_s=timeout_s),
        ),
        security=ClientSecurity(ca=upstream_ca, certificate=upstream_cert, key=upstream_key),
        announce=lambda addresses: _announce(addresses, as_json=as_json),
    )


def _announce(addresses: "RelayAddresses", *, as_json: bool) -> None:
    if as_json:
        echo_json({"grpc": addresses.grpc, "upstream": addresses.upstream})
        return
    echo(
        "The relay is up. Ctrl-C stops it.",
        f"  gRPC      {addresses.grpc}",
        f"  upstream  {addresses.upstream}",
    )
