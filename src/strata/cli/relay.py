"""`strata relay`: serve the workers of a node through one connection to the coordinator."""

from typing import TYPE_CHECKING, Annotated

import typer

from strata.terminal import echo, echo_json

if TYPE_CHECKING:
    from strata.coordinator.relay.relay import RelayAddresses


def relay(
    upstream: Annotated[
        str,
        typer.Option(
            help="Address of the coordinator or another relay: HOST:PORT or unix:PATH; list leader and standbys "
            "separated by commas."
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(help="Address to serve the node's workers on: HOST:PORT or unix:PATH; port 0 picks a free one."),
    ] = "127.0.0.1:50052",
    tokens: Annotated[
        str, typer.Option(help="File of the tokens to accept from workers, one 'ROLE TOKEN' per line.")
    ] = "",
    tls_cert: Annotated[str, typer.Option(help="Certificate of this relay (PEM).")] = "",
    tls_key: Annotated[str, typer.Option(help="Private key of --tls-cert (PEM).")] = "",
    tls_client_ca: Annotated[
        str, typer.Option(help="Require worker certificates signed by this CA certificate (PEM).")
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow any listen address without tokens and TLS.")
    ] = False,
    upstream_ca: Annotated[
        str, typer.Option(help="CA certificate (PEM) of the coordinator; enables TLS. Default: STRATA_TLS_CA.")
    ] = "",
    upstream_cert: Annotated[
        str, typer.Option(help="Client certificate (PEM) to present to the coordinator. Default: STRATA_TLS_CERT.")
    ] = "",
    upstream_key: Annotated[
        str, typer.Option(help="Private key of --upstream-cert (PEM). Default: STRATA_TLS_KEY.")
    ] = "",
    timeout_s: Annotated[
        float, typer.Option(help="Seconds to wait for the coordinator at startup before giving up.", min=0.1)
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one line of JSON.")] = False,
) -> None:
    """Run a relay that serves the workers of one node.

    Workers use the relay like a coordinator. The relay keeps one connection to
    the coordinator for all of them; its token comes from STRATA_TOKEN or
    STRATA_TOKEN_FILE. Stop it with Ctrl-C or SIGTERM.
    """
    from strata.coordinator.client import ClientConfig  # noqa: PLC0415 (imports grpc)
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
