"""The page of one run or one study of this machine: what is served with its coordinator, and who may open it.

`opener` checks an address and returns what `launch` calls with the directory once that exists. Nothing of FastAPI is
imported before a browser connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.coordinator.extension import HttpOptions
from strata.dashboard.explorer.part import ExplorerPart, NoPlaces
from strata.dashboard.extension import Dashboard
from strata.dashboard.history.file import path_beside
from strata.dashboard.run import DirectoryRun
from strata.dashboard.run_record import RunRecord
from strata.errors import ConfigError
from strata.launch.environment import storage_options_in
from strata.launch.run import RunPage
from strata.terminal import echo
from strata.transport.addresses import parse_address

if TYPE_CHECKING:
    from strata.launch.record.directory import RunDirectory
    from strata.launch.run import PageOf

LISTEN = "127.0.0.1:0"
"""Where a page listens by default: port 0 picks a free one."""
OFF = "off"
VIEW_OF_STUDY = "/tuning"
"""The view of the page on which a study opens."""


def opener(dashboard: bool | str, *, quiet: bool = False, is_study: bool = False) -> PageOf | None:
    """Return what opens the page of a run, or of a study; None if there shall be none.

    Args:
        dashboard: HOST:PORT of this machine's loopback; True for a free port, False or "off" for no page.
        quiet: Do not print the address.

    Raises:
        ConfigError: It is not an address, or other machines could reach it, for which a run has no tokens.
    """
    if isinstance(dashboard, bool):
        dashboard = LISTEN if dashboard else OFF
    if not isinstance(dashboard, str):
        raise ConfigError(
            f"dashboard={dashboard!r} must be True, False or HOST:PORT, such as '127.0.0.1:8000'", field="dashboard"
        )
    if dashboard == OFF:
        return None
    listen = dashboard
    parsed = parse_address(listen, field="dashboard")
    if parsed.path or not parsed.is_local:
        raise ConfigError(
            f"dashboard {listen} is not an address of this machine's loopback; use 127.0.0.1:PORT, and ssh -L to reach "
            "it from another machine",
            field="dashboard",
        )

    def announce(url: str) -> None:
        if not quiet:
            echo(f"dashboard: {url}", err=True)

    def page_of(directory: RunDirectory) -> RunPage:
        extension = _of_study(directory) if is_study else _of_run(directory)
        options = HttpOptions(extensions=(extension,), is_lazy=True, is_private=True)
        view = VIEW_OF_STUDY if is_study else ""
        return RunPage(listen=listen, options=options, announce=lambda url: announce(f"{url}{view}"))

    return page_of


def _of_run(directory: RunDirectory) -> Dashboard:
    spec = directory.spec
    options = storage_options_in(spec.variables) if "://" in spec.checkpoints else {}
    return Dashboard(
        history=path_beside(directory.journal),
        parts=[ExplorerPart(spec.checkpoints, label=directory.name, storage_options=options)],
        run=DirectoryRun(directory),
        record=RunRecord(directory),
    )


def _of_study(directory: RunDirectory) -> Dashboard:
    """Each trial is a job of its own, so logs by rank, recoveries and checkpoints of one run do not apply."""
    from strata.dashboard.studies.source import Studies, StudySource  # noqa: PLC0415 - imports numpy

    studies = Studies([StudySource(directory)], takes_orders=True)
    return Dashboard(history=path_beside(directory.journal), parts=[NoPlaces()], studies=studies)
