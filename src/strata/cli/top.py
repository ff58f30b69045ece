"""`strata top`: the overview of the dashboard, live on a terminal."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from strata.cli.status import NO_ACTIVE_RUN
from strata.terminal import Console, echo, echo_json

if TYPE_CHECKING:
    from strata.clock import Clock
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.screen import Screen
    from strata.transport.credentials import ClientSecurity

INTERVAL_S = 1.0
"""The coordinator samples as often."""
_WIDE = 160
"""Width in characters when the output is not a terminal."""


def top(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Name of a run on this machine. Default: the active run.", show_default=False
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            help="HTTP address of a coordinator; list leader and standbys separated by commas. "
            "Default without an active run: http://127.0.0.1:51051."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the overview once and exit.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)] = 5.0,
    token_file: Annotated[
        str, typer.Option(help="File that contains the token. Default: STRATA_TOKEN or STRATA_TOKEN_FILE.")
    ] = "",
    tls_ca: Annotated[str, typer.Option(help="CA certificate (PEM) of the coordinator. Default: STRATA_TLS_CA.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the overview once as one JSON object.")] = False,
) -> None:
    """Show jobs, rates, workers and health live.

    Shows the overview of the dashboard, once a second until Ctrl-C or the end of
    the run. Prints it once if the output is not a terminal.
    """
    from strata.cli.runs import choose_run  # noqa: PLC0415
    from strata.clock import SystemClock  # noqa: PLC0415
    from strata.dashboard.top import TopView, parse, render  # noqa: PLC0415 (imports rich)
    from strata.errors import CoordinatorUnavailable  # noqa: PLC0415
    from strata.launch.record.screen import Screen, can_draw  # noqa: PLC0415
    from strata.transport.credentials import ClientSecurity  # noqa: PLC0415 (imports grpc)

    security = ClientSecurity(token_file=token_file, ca=tls_ca)
    run = choose_run(name, is_elsewhere=http is not None)
    source: Source = _Coordinator(http, security, timeout_s) if run is None else _Run(run, security, timeout_s)
    try:
        answer = source.read()
    except CoordinatorUnavailable as error:
        if run is not None or http is not None:
            raise
        raise CoordinatorUnavailable(f"{NO_ACTIVE_RUN}. {error.message}") from error
    if as_json:
        echo_json(answer)
    elif once or not can_draw(sys.stdout):
        view = TopView(title=source.title, address=source.address, overview=parse(answer))
        Console(width=None if sys.stdout.isatty() else _WIDE).print(render(view))
    else:
        clock = SystemClock()
        screen = Screen(sys.stdout, clock)
        try:
            end = follow(source, answer, screen, clock, pause=lambda: time.sleep(INTERVAL_S))
        finally:
            screen.close()
        if end:
            echo(end)


class Source(Protocol):
    title: str

    @property
    def address(self) -> str: ...

    def read(self) -> Any:
        """Return the JSON of the overview. Raises `StrataError` with the reason if there is none."""
        ...

    def end(self) -> str:
        """Return how it ended; empty while there may be more to read."""
        ...


def follow(source: Source, answer: Any, screen: "Screen", clock: "Clock", *, pause: Callable[[], None]) -> str:
    """Draw the overview until its source ends or the terminal is closed; return how it ended. An answer that does not
    arrive leaves the last one on the screen, with the reason.
    """
    from strata.dashboard.top import TopView, parse, render  # noqa: PLC0415
    from strata.errors import StrataError  # noqa: PLC0415

    overview, problem, read_s = parse(answer), "", clock.monotonic_s()
    while True:
        age_s = clock.monotonic_s() - read_s
        view = TopView(title=source.title, address=source.address, overview=overview, problem=problem, age_s=age_s)
        screen.show(render(view))
        if not screen.is_open:
            return ""
        pause()
        try:
            overview = parse(source.read())
            problem, read_s = "", clock.monotonic_s()
        except StrataError as error:
            if end := source.end():
                return end
            problem = error.message


class _Coordinator:
    def __init__(self, urls: str | None, security: "ClientSecurity", timeout_s: float) -> None:
        from strata.cli.http import DEFAULT_HTTP, HttpApi  # noqa: PLC0415

        self._api = HttpApi(urls or DEFAULT_HTTP, security=security, timeout_s=timeout_s)
        self.title = "coordinator"

    @property
    def address(self) -> str:
        return self._api.urls[0]

    def read(self) -> Any:
        return _overview(self._api)

    def end(self) -> str:
        return ""


class _Run:
    """A run on this machine, whose page has another port after each `strata resume`."""

    def __init__(self, run: "RunDirectory", security: "ClientSecurity", timeout_s: float) -> None:
        self._run = run
        self._security = security
        self._timeout_s = timeout_s
        self.title = f"run {run.name}"
        self.address = ""

    def read(self) -> Any:
        from strata.cli.http import HttpApi  # noqa: PLC0415
        from strata.errors import ConfigError  # noqa: PLC0415
        from strata.launch.record.directory import UNDER_WAY, state_now  # noqa: PLC0415

        name, status = self._run.name, self._run.status
        state = state_now(status)
        if status is None or state not in UNDER_WAY:
            cure = f"`strata resume {name}` starts it again" if state == "interrupted" else "it has ended"
            raise ConfigError(
                f"run {name} is not active ({state}); {cure}, and `strata events {name}` prints its history",
                field="run",
            )
        if not status.page:
            raise ConfigError(
                f"run {name} serves no page to read from; `strata status {name}` lists its workers, and --http takes "
                "the address of a coordinator that it shares with other runs",
                field="run",
            )
        self.address = status.page
        return _overview(HttpApi(status.page, security=self._security, timeout_s=self._timeout_s))

    def end(self) -> str:
        from strata.launch.record.directory import UNDER_WAY, state_now  # noqa: PLC0415

        status = self._run.status
        state = state_now(status)
        if status is None or state in UNDER_WAY or state == "interrupted":
            return ""
        return f"run {self._run.name} {state}: {status.reason}"


def _overview(api: Any) -> Any:
    from strata.dashboard.top import MAX_JOBS  # noqa: PLC0415

    return api.get("/api/overview", limit=MAX_JOBS)
