"""`strata events`: print the history of a job, from its coordinator over HTTP or from the state on disk."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import typer
from rich.markup import escape

from strata.cli.status import NO_ACTIVE_RUN
from strata.terminal import Console, echo, echo_json

PAGE = 1_000
POLL_S = 0.5


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
            "Default without an active run: http://127.0.0.1:51051."
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
        with _over_http(http) if state is None else _in_state(state) as pages:
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
def _over_http(urls: str | None) -> Iterator[Pages]:
    from strata.cli.http import DEFAULT_HTTP, HttpApi  # noqa: PLC0415 (imports grpc)

    api = HttpApi(urls or DEFAULT_HTTP)

    def pages(*, after: int, **filters: str | None) -> dict[str, Any]:
        given = {name: value for name, value in filters.items() if value is not None}
        page: dict[str, Any] = api.get("/api/events", after=after, limit=PAGE, **given)
        return page

    yield pages
