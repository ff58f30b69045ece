"""`strata coordinator`: serve until told to stop."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from strata import config as configs
from strata.terminal import Console, echo, echo_json

if TYPE_CHECKING:
    from strata.coordinator.config import CoordinatorConfig
    from strata.coordinator.server import ServerAddresses

DEFAULT_FILE = Path("coordinator.yaml")


def coordinator(
    listen: Annotated[
        str | None,
        typer.Option(help="Where to serve gRPC: HOST:PORT or unix:PATH; port 0 picks one. Default: 127.0.0.1:50051."),
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="Where to serve HTTP: HOST:PORT, or 'off'. Default: 127.0.0.1:51051.")
    ] = None,
    frames: Annotated[
        str | None,
        typer.Option(
            help="Where to serve sessions without HTTP/2: HOST:PORT or unix:PATH, 'auto' (a free port) or 'off'. "
            "Default: auto."
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="Path or database URL of the state; 'memory' keeps it nowhere. Default: in your state directory."
        ),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="The server's certificate chain, a PEM file.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key, a PEM file.")] = None,
    client_ca: Annotated[
        str | None, typer.Option(help="Ask every client for a certificate of this authority, a PEM file.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="A file with a line of ROLE TOKEN for each token; read again when it changes."),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Serve any address without tokens and TLS: everybody may do everything."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML file of settings; flags win over it. Default: ./coordinator.yaml, if there is one."),
    ] = None,
    standby: Annotated[
        bool | None,
        typer.Option("--standby", help="Wait until no other coordinator leads this state, then take over."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Where others are told to find this coordinator. Default: where it listens.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the chain of timeouts that the settings give, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one line of JSON.")] = False,
) -> None:
    """Serve a coordinator: who is here, what is theirs, what has been agreed on.

    It stops on Ctrl-C or SIGTERM and goes on from its state when it is started again.
    """
    if config is None and DEFAULT_FILE.is_file():
        config = DEFAULT_FILE
        echo(f"using ./{DEFAULT_FILE}", err=True)
    security = {
        "certificate": tls_cert,
        "key": tls_key,
        "client_ca": client_ca,
        "tokens": tokens,
        "insecure": insecure,
    }
    flags = {
        "listen": listen,
        "http": http,
        "frames": frames,
        "state": state,
        "standby": standby,
        "advertise": advertise,
    }
    settings = resolve(config, {**flags, "security": security})
    if explain:
        _explain(settings, as_json=as_json)
        return

    from strata.coordinator.server import run  # noqa: PLC0415 (grpc and sqlalchemy are behind it)

    run(settings, announce=lambda addresses: _announce(addresses, as_json=as_json))


def resolve(file: Path | None, flags: Mapping[str, Any]) -> "CoordinatorConfig":
    """The config that a file and the flags make together; flags that are None were not given."""
    from strata.coordinator.config import CoordinatorConfig  # noqa: PLC0415

    values = configs.merge({} if file is None else configs.read_yaml(file), flags)
    return configs.load(CoordinatorConfig, values, source="flags" if file is None else str(file))


def _explain(config: "CoordinatorConfig", *, as_json: bool) -> None:
    from strata.coordinator import timeouts  # noqa: PLC0415

    if as_json:
        echo_json(timeouts.explained(config))
        return
    console = Console(highlight=False)
    chain = Table(title="The chain of timeouts", title_justify="left", show_lines=True)
    for heading in ("link", "seconds", "set by", "means", "stands there because"):
        chain.add_column(heading, justify="right" if heading == "seconds" else "left")
    for link in timeouts.chain(config):
        chain.add_row(link.name, f"{link.seconds:g}", link.setting or "(follows)", link.means, link.follows)
    console.print(chain)
    deaths = Table(title="How long a death goes unnoticed at the most", title_justify="left")
    for heading in ("death", "seconds", "that is"):
        deaths.add_column(heading, justify="right" if heading == "seconds" else "left")
    for found in timeouts.detections(config):
        deaths.add_row(found.death, "never" if found.within_s is None else f"{found.within_s:g}", found.sum_of)
    console.print(deaths)


def _announce(addresses: "ServerAddresses", *, as_json: bool) -> None:
    if as_json:
        echo_json({"grpc": addresses.grpc, "http": addresses.http, "state": addresses.state, "leads": addresses.leads})
        return
    echo(
        f"The coordinator {'is up' if addresses.leads else 'stands by'}. Ctrl-C stops it.",
        f"  gRPC   {addresses.grpc}",
        f"  HTTP   {addresses.http or 'off'}",
        f"  state  {addresses.state}",
    )
