"""`strata dashboard`: look into checkpoints in a browser, with no coordinator."""

from typing import Annotated

import typer

from strata.cli.checkpoints import Options, located_options
from strata.terminal import echo, echo_json


def dashboard(
    locations: Annotated[
        list[str],
        typer.Argument(metavar="DIR|URL|FILE|RUN...", help="Directories, buckets, .safetensors files or runs to open."),
    ],
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on; 0 picks a free one.", min=0, max=65_535)] = 51_052,
    tls_cert: Annotated[str, typer.Option(help="Certificate chain of the server (PEM); enables TLS.")] = "",
    tls_key: Annotated[str, typer.Option(help="Private key of --tls-cert (PEM).")] = "",
    tokens: Annotated[str, typer.Option(help="File of accepted tokens, one 'ROLE TOKEN' per line.")] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow any address without tokens and TLS: everyone can read.")
    ] = False,
    max_read_bytes: Annotated[int, typer.Option(help="Bytes that one request may read.", min=1)] = 4 << 30,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.", min=0.1)] = 20.0,
    storage_option: Options = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")] = False,
) -> None:
    """Explore checkpoints in a browser.

    Opens directories and buckets of checkpoints, single checkpoints, plain
    safetensors files and runs that are over, without a coordinator. Reads only,
    and only what is looked at. Stop it with Ctrl-C.
    """
    from strata.coordinator.config import SecurityConfig  # noqa: PLC0415
    from strata.dashboard.explorer.limits import ExplorerConfig  # noqa: PLC0415
    from strata.dashboard.explorer.places import Places, open_place  # noqa: PLC0415 (imports numpy)
    from strata.dashboard.explorer.server import ServerConfig, run  # noqa: PLC0415 (imports FastAPI)

    limits = ExplorerConfig(max_read_bytes=max_read_bytes, request_timeout_s=timeout, scan_s=min(2.0, timeout))
    security = SecurityConfig(certificate=tls_cert, key=tls_key, tokens=tokens, insecure=insecure)
    places = Places(
        [open_place(one, located_options(one, storage_option)) for one in locations], max_places=limits.max_places
    )

    def announce(url: str) -> None:
        if as_json:
            echo_json({"http": url, "places": [place.id for place in places.all()]})
            return
        echo("The explorer is up. Ctrl-C stops it.", f"  {url}")

    run(places, ServerConfig(host=host, port=port, security=security), limits, announce=announce)
