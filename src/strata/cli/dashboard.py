"""`strata dashboard`: look into runs that are over, checkpoints and studies in a browser, with no coordinator."""

from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.checkpoints import Options, located_options
from strata.terminal import echo, echo_json

if TYPE_CHECKING:
    from strata.dashboard.ended import EndedRun
    from strata.dashboard.explorer.places import Place
    from strata.launch.record.directory import RunDirectory


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
    """Explore ended runs, checkpoints and studies in a browser.

    Opens directories and buckets of checkpoints, single checkpoints, plain
    safetensors files, runs that are over and studies, without a coordinator.
    One run that is over has the page that it had while it was active: charts,
    goodput, recoveries, events and logs, as far as its directory has them.
    Reads only, and only what is looked at. Stop it with Ctrl-C.
    """
    from strata.coordinator.config import SecurityConfig  # noqa: PLC0415
    from strata.dashboard.ended import EndedSite  # noqa: PLC0415 (imports FastAPI)
    from strata.dashboard.explorer.limits import ExplorerConfig  # noqa: PLC0415
    from strata.dashboard.explorer.places import Places  # noqa: PLC0415 (imports numpy)
    from strata.dashboard.explorer.server import ExplorerSite, ServerConfig, serve  # noqa: PLC0415 (imports FastAPI)
    from strata.dashboard.studies.source import Studies, open_study  # noqa: PLC0415
    from strata.launch.record.directory import find_run  # noqa: PLC0415

    limits = ExplorerConfig(max_read_bytes=max_read_bytes, request_timeout_s=timeout, scan_s=min(2.0, timeout))
    security = SecurityConfig(certificate=tls_cert, key=tls_key, tokens=tokens, insecure=insecure)
    opened = [(one, open_study(one)) for one in locations]
    studies = Studies(study for _, study in opened if study is not None)
    others = [one for one, study in opened if study is None]
    ended = _open_ended([run for one in others if (run := find_run(one)) is not None])
    places = Places(
        (_open_place(one, located_options(one, storage_option), ended) for one in others), max_places=limits.max_places
    )
    site = ExplorerSite(places, limits, studies) if ended is None else EndedSite(ended, places, limits, studies)

    def announce(url: str) -> None:
        if as_json:
            run = None if ended is None else ended.directory.name
            shown = {"places": [place.id for place in places.all()], "studies": [each.id for each in studies.all()]}
            echo_json({"http": url, "run": run, **shown})
            return
        echo("The dashboard is up. Ctrl-C stops it.", f"  {url}")

    server = ServerConfig(host=host, port=port, security=security)
    serve(site, server, announce=announce)


def _open_ended(runs: "list[RunDirectory]") -> "EndedRun | None":
    """Return the run whose whole page is shown: the only one, if it is over. Of others, report why not."""
    from strata.dashboard.ended import EndedRun  # noqa: PLC0415 (imports FastAPI)
    from strata.errors import ConfigError  # noqa: PLC0415

    if len(runs) != 1:
        if runs:
            echo("Of several runs only the checkpoints are opened; name one run to see everything.", err=True)
        return None
    try:
        return EndedRun(runs[0])
    except ConfigError as error:
        echo(f"{error.message}. Only its checkpoints are opened.", err=True)
        return None


def _open_place(location: str, options: dict[str, str], ended: "EndedRun | None") -> "Place":
    from strata.dashboard.explorer.places import open_checkpoints, open_place  # noqa: PLC0415 (imports numpy)
    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.launch.record.directory import find_run  # noqa: PLC0415

    try:
        return open_place(location, options)
    except ConfigError:
        run = None if ended is None else find_run(location)
        if run is None:
            raise
        return open_checkpoints(run.spec.checkpoints, label=run.name, storage_options=options)  # it has saved nothing
