"""`strata coordinator`: serve a coordinator, or explain its timeouts."""

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
        typer.Option(
            help="Address to serve gRPC on: HOST:PORT or unix:PATH; port 0 picks a free one. Default: 127.0.0.1:50051."
        ),
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="Address to serve HTTP on: HOST:PORT, or 'off'. Default: 127.0.0.1:51051.")
    ] = None,
    frames: Annotated[
        str | None,
        typer.Option(
            help="Address for sessions over plain connections, which need less CPU than gRPC: HOST:PORT or unix:PATH, "
            "'auto' (a free port) or 'off'. Default: auto."
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="Path or database URL where the state is saved; 'memory' does not save it. "
            "Default: a file in your state directory."
        ),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate chain of the server (PEM); enables TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Private key of --tls-cert (PEM).")] = None,
    client_ca: Annotated[
        str | None, typer.Option(help="Require client certificates signed by this CA certificate (PEM).")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="File of accepted tokens, one 'ROLE TOKEN' per line; reloaded when it changes."),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure", help="Allow any listen address without tokens and TLS: every client has full access."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of settings; flags override it. Default: ./coordinator.yaml if it exists."),
    ] = None,
    standby: Annotated[
        bool | None,
        typer.Option("--standby", help="Wait while another coordinator uses this state, then take over."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Address at which clients reach this coordinator. Default: the listen address.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the timeouts that follow from the settings, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one line of JSON.")] = False,
) -> None:
    """Run a coordinator (membership, shards, barriers).

    Stop it with Ctrl-C or SIGTERM. When restarted, it continues from its saved
    state.
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

    from strata.coordinator.extension import HttpOptions  # noqa: PLC0415
    from strata.coordinator.server import run  # noqa: PLC0415 (imports grpc and sqlalchemy)
    from strata.dashboard.explorer.part import NoPlaces  # noqa: PLC0415
    from strata.dashboard.extension import Dashboard, history_of  # noqa: PLC0415

    run(
        settings,
        announce=lambda addresses: _announce(addresses, as_json=as_json),
        http=HttpOptions(extensions=(Dashboard(history=history_of(settings.state), parts=[NoPlaces()]),)),
    )


def resolve(file: Path | None, flags: Mapping[str, Any]) -> "CoordinatorConfig":
    """Return the config from a file and the flags, which override it; a flag that is None was not given."""
    from strata.coordinator.config import CoordinatorConfig  # noqa: PLC0415

    values = configs.merge({} if file is None else configs.read_yaml(file), flags)
    return configs.load(CoordinatorConfig, values, source="flags" if file is None else str(file))


def _explain(config: "CoordinatorConfig", *, as_json: bool) -> None:
    from strata.coordinator import timeouts  # noqa: PLC0415

    if as_json:
        echo_json(timeouts.explained(config))
        return
    console = Console(highlight=False)
    chain = Table(title="Timeouts", title_justify="left", show_lines=True)
    for heading in ("timeout", "seconds", "setting", "meaning", "constraint"):
        chain.add_column(heading, justify="right" if heading == "seconds" else "left")
    for link in timeouts.chain(config):
        chain.add_row(link.name, f"{link.seconds:g}", link.setting or "(derived)", link.means, link.follows)
    console.print(chain)
    deaths = Table(title="Longest time until a failure is detected", title_justify="left")
    for heading in ("failure", "seconds", "sum of"):
        deaths.add_column(heading, justify="right" if heading == "seconds" else "left")
    for found in timeouts.detections(config):
        deaths.add_row(found.death, "never" if found.within_s is None else f"{found.within_s:g}", found.sum_of)
    console.print(deaths)


def _announce(addresses: "ServerAddresses", *, as_json: bool) -> None:
    if as_json:
        echo_json({"grpc": addresses.grpc, "http": addresses.http, "state": addresses.state, "leads": addresses.leads})
        return
    echo(
        f"The coordinator is {'up' if addresses.leads else 'on standby'}. Ctrl-C stops it.",
        f"  gRPC   {addresses.grpc}",
        f"  HTTP   {addresses.http or 'off'}",
        *((f"  page   {_page(addresses.http)}",) if addresses.http else ()),
        f"  state  {addresses.state}",
    )


def _page(http: str) -> str:
    """Return the address of the dashboard for a browser, which cannot open 0.0.0.0."""
    from urllib.parse import urlsplit  # noqa: PLC0415

    parts = urlsplit(http)
    if parts.hostname in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        import socket  # noqa: PLC0415

        return f"{parts.scheme}://{socket.gethostname()}:{parts.port}/"
    return f"{http}/"
