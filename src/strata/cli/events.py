"""`strata events`: print the history of a job, from its coordinator over HTTP or from the state on disk."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.markup import escape

from strata.cli.status import NO_ACTIVE_RUN
from strata.terminal import Console, echo, echo_json

if TYPE_CHECKING:
    from strata.errors import StrataError

DEFAULT_HTTP = "http://127.0.0.1:51051"
PAGE = 1_000
POLL_S = 0.5
TIMEOUT_S = 15.0


class Pages(Protocol):
    def __call__(self, *, after: int, **filters: str | None) -> dict[str, Any]: ...


def events(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Name of a run on this machine. Default: the active run.", show_default=False
        ),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Print only events of this job.")] = None,
    worker: Annotated[str | None, typer.Option(help="Print only events of this worker.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="Print only events of this kind, such as WorkerLeft or GenerationStarted.")
    ] = None,
    after: Annotated[int, typer.Option(help="Start after this entry number.", min=0)] = 0,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Keep printing new events until Ctrl-C; wait if the coordinator goes away."),
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(
            help="HTTP address of a coordinator; list leader and standbys separated by commas. "
            f"Default without an active run: {DEFAULT_HTTP}."
        ),
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="Read the saved state of a coordinator: path or database URL.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Print what happened to a job, and why.

    Prints workers that join and leave, new generations and moved shards. Reads
    them from a run on this machine (also after it has ended), from a coordinator
    (--http) or from the saved state of a coordinator (--state). --http uses
    STRATA_TOKEN and STRATA_TLS_CA.
    """
    from strata.cli.runs import choose_run  # noqa: PLC0415
    from strata.errors import ConfigError, CoordinatorUnavailable  # noqa: PLC0415

    if http is not None and state is not None:
        raise ConfigError("--http and --state are two sources of events; give only one of them")
    run = choose_run(name, is_elsewhere=http is not None or state is not None)
    is_default = run is None and http is None and state is None
    if run is not None:
        if run.spec.coordinator:
            raise ConfigError(
                f"the coordinator at {run.spec.coordinator} keeps the events of run {run.name}; give its HTTP address: "
                "--http http://HOST:51051",
                field="http",
            )
        state = str(run.journal)
    console = Console(highlight=False)
    filters = {"job": job, "worker": worker, "kind": kind}
    has_events = False
    try:
        with _over_http(http or DEFAULT_HTTP) if state is None else _in_state(state) as pages:
            for line in _lines(pages, after, follow=follow, filters=filters):
                has_events = True
                echo_json(line) if as_json else _print_event(console, line)
    except CoordinatorUnavailable as error:
        if not is_default:
            raise
        raise CoordinatorUnavailable(f"{NO_ACTIVE_RUN}. {error.message}") from error
    if not has_events and not as_json:
        console.print("no events match" if any(filters.values()) else "no events yet")


def _lines(pages: Pages, after: int, *, follow: bool, filters: dict[str, str | None]) -> Iterator[dict[str, Any]]:
    from strata.errors import CoordinatorUnavailable  # noqa: PLC0415

    has_answered = False
    is_lost = False
    while True:
        try:
            page = pages(after=after, **filters)
        except CoordinatorUnavailable as error:
            if not (follow and has_answered):
                raise
            if not is_lost:
                echo(f"waiting: {error.message}", err=True)
            is_lost = True
            time.sleep(POLL_S)
            continue
        has_answered, is_lost = True, False
        yield from page["items"]
        after = page["next_after"]
        if page["more"]:
            continue
        if not follow:
            return
        time.sleep(POLL_S)


def _print_event(console: Console, line: dict[str, Any]) -> None:
    when = line["at"][:19].replace("T", " ")
    style = {"GenerationStarted": "bold", "WorkerLeft": "red", "WorkerJoined": "green"}.get(line["kind"], "default")
    console.print(
        f"[dim]{line['seq']:>6}  {when}[/dim]  [cyan]{escape(line['job_id'])}[/cyan]  "
        f"[{style}]{escape(line['words'])}[/{style}]",
        soft_wrap=True,
    )


@contextmanager
def _in_state(state: str) -> Iterator[Pages]:
    from strata.coordinator.http import views  # noqa: PLC0415 (imports numpy and sqlalchemy)
    from strata.coordinator.journal import open_journal  # noqa: PLC0415

    journal = open_journal(state, readonly=True)

    def pages(*, after: int, **filters: str | None) -> dict[str, Any]:
        job_id, kind, worker_id = (filters[name] for name in ("job", "kind", "worker"))
        found = views.events(journal, after=after, limit=PAGE, job_id=job_id, kind=kind, worker_id=worker_id)
        return found.model_dump()

    try:
        yield pages
    finally:
        journal.close()


@contextmanager
def _over_http(urls: str) -> Iterator[Pages]:
    """Ask the coordinators in turn until the leader answers; a standby refuses."""
    from strata.errors import CoordinatorUnavailable  # noqa: PLC0415

    candidates = [_pages_at(url.strip()) for url in urls.split(",")]

    def pages(*, after: int, **filters: str | None) -> dict[str, Any]:
        for num_left in range(len(candidates), 0, -1):
            try:
                return candidates[0](after=after, **filters)
            except CoordinatorUnavailable:
                candidates.append(candidates.pop(0))  # the next one may be the leader now
                if num_left == 1:
                    raise
        raise AssertionError("unreachable")

    yield pages


def _pages_at(url: str) -> Pages:
    import urllib.error  # noqa: PLC0415
    import urllib.parse  # noqa: PLC0415
    import urllib.request  # noqa: PLC0415

    from strata.errors import ConfigError, CoordinatorUnavailable  # noqa: PLC0415
    from strata.transport.credentials import ClientSecurity  # noqa: PLC0415

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--http={url!r} is not an HTTP address; write it as http://HOST:PORT")
    context = _tls() if url.startswith("https://") else None
    headers = dict(ClientSecurity().metadata())

    def pages(*, after: int, **filters: str | None) -> dict[str, Any]:
        given = {name: value for name, value in filters.items() if value is not None}
        query = urllib.parse.urlencode({"after": after, "limit": PAGE, **given})
        request = urllib.request.Request(f"{url.rstrip('/')}/api/events?{query}", headers=headers)  # noqa: S310 (above)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as response:  # noqa: S310
                page: dict[str, Any] = json.load(response)
                return page
        except urllib.error.HTTPError as error:
            with error:
                raise _error_from(error.code, error.read()) from error
        except (OSError, ValueError) as error:
            raise CoordinatorUnavailable(
                f"no coordinator answers at {url} ({error}); check that it is running and that this is its HTTP address"
            ) from error

    return pages


def _tls() -> Any:
    import os  # noqa: PLC0415
    import ssl  # noqa: PLC0415

    from strata.errors import ConfigError  # noqa: PLC0415
    from strata.transport.credentials import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE  # noqa: PLC0415

    try:
        context = ssl.create_default_context(cafile=os.environ.get(CA_VARIABLE) or None)
        if certificate := os.environ.get(CERT_VARIABLE):
            context.load_cert_chain(certificate, os.environ.get(KEY_VARIABLE) or None)
    except OSError as error:
        raise ConfigError(
            f"cannot load the certificates named by {CA_VARIABLE}, {CERT_VARIABLE} and {KEY_VARIABLE}: {error}"
        ) from error
    return context


def _error_from(code: int, body: bytes) -> "StrataError":
    """Return the error that the coordinator answered with."""
    from strata.errors import BY_KIND, CoordinatorError  # noqa: PLC0415

    try:
        problem = json.loads(body)["error"]
        return BY_KIND.get(problem["kind"], CoordinatorError)(problem["message"], field=problem["field"])
    except (ValueError, KeyError, TypeError):
        return CoordinatorError(
            f"got HTTP {code}, not an answer of a coordinator; check that --http is the coordinator's HTTP address"
        )
