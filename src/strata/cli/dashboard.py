"""`strata dashboard`: look into checkpoints and studies in a browser, with no coordinator."""

from typing import Annotated

import typer

from strata.cli.checkpoints import Options, located_options
from strata.terminal import echo, echo_json


def dashboard(
    locations: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR|URL|FILE|NAME...",
            help="Directories, buckets, .safetensors files, runs or studies to open.",
        ),
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
    """Explore checkpoints and studies in a browser.

    Opens directories and buckets of checkpoints, single checkpoints, plain
    safetensors files, runs that are over and studies, without a coordinator.
    Reads only, and only what is looked at. Stop it with Ctrl-C.
    """
    from strata.coordinator.config import SecurityConfig  # noqa: PLC0415
    from strata.dashboard.explorer.limits import ExplorerConfig  # noqa: PLC0415
    from strata.dashboard.explorer.places import Places, open_place  # noqa: PLC0415 (imports numpy)
    from strata.dashboard.explorer.server import ServerConfig, run  # noqa: PLC0415 (imports FastAPI)
    from strata.dashboard.studies.source import Studies, open_study  # noqa: PLC0415

    limits = ExplorerConfig(max_read_bytes=max_read_bytes, request_timeout_s=timeout, scan_s=min(2.0, timeout))
    security = SecurityConfig(certificate=tls_cert, key=tls_key, tokens=tokens, insecure=insecure)
    opened = [(one, open_study(one)) for one in locations]
    studies = Studies(study for _, study in opened if study is not None)
    places = Places(
        [open_place(one, located_options(one, storage_option)) for one, study in opened if study is None],
        max_places=limits.max_places,
    )

    def announce(url: str) -> None:
        if as_json:
            shown = {"places": [place.id for place in places.all()], "studies": [each.id for each in studies.all()]}
            echo_json({"http": url, **shown})
            return
        echo("The dashboard is up. Ctrl-C stops it.", f"  {url}")

    server = ServerConfig(host=host, port=port, security=security)
    run(places, server, limits, announce=announce, studies=studies)
