"""The dashboard as an extension of the coordinator's HTTP server: joins sampling, history, live updates and routes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from strata.dashboard.history.file import path_beside
from strata.dashboard.sampler import INTERVAL_S, Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import APIRouter, FastAPI

    from strata.coordinator.http.access import Doors
    from strata.coordinator.serve.engine import Engine
    from strata.coordinator.serve.session import SessionHub
    from strata.dashboard.live.broadcast import Broadcast
    from strata.dashboard.run import RunControl
    from strata.dashboard.run_record import RunRecord
    from strata.dashboard.studies.source import Studies

STATIC = Path(__file__).parent / "static"
PAGE_ROUTES = (
    "http.data_routes",
    "http.goodput_routes",
    "http.lineage_routes",
    "http.server_routes",
    "http.time_routes",
)


class Part(Protocol):
    """Further routes of the dashboard, such as those of the explorer."""

    def load(self) -> None:
        """Import what `add_to` needs, on another thread."""
        ...

    def add_to(self, router: APIRouter) -> None:
        """Add routes whose requests are rate-limited, authenticated and from our own page."""
        ...

    def close(self) -> None:
        """End threads; requests in progress are cancelled. Does not wait."""
        ...


class Dashboard:
    """Implements `Extension`. Nothing of FastAPI is imported before `extend`."""

    def __init__(
        self,
        *,
        history: Path | None = None,
        parts: Sequence[Part] = (),
        run: RunControl | None = None,
        record: RunRecord | None = None,
        studies: Studies | None = None,
        interval_s: float = INTERVAL_S,
        static: Path = STATIC,
    ) -> None:
        """
        Args:
            history: The file of the history, None to keep it in memory.
            run: Reads the logs of the run whose page this is, and carries out commands.
            record: The directory of that run, which has its timeline.
            studies: The study whose page this is.
        """
        self._record = record
        self._studies = studies
        self._history = history
        self._parts = tuple(parts)
        self._run = run
        self._interval_s = interval_s
        self._static = static
        self._engine: Engine | None = None
        self._sampler: Sampler | None = None
        self._broadcast: Broadcast | None = None

    def start(self, engine: Engine, hub: SessionHub) -> None:
        self._engine = engine
        self._sampler = self._make_sampler(engine, hub)
        self._sampler.start()

    def _make_sampler(self, engine: Engine, hub: SessionHub) -> Sampler:
        return Sampler(engine, hub, history=self._history, interval_s=self._interval_s)

    def load(self) -> None:
        other = ("http.login", "http.pages", "http.routes", "http.run", "live.broadcast", "studies.routes")
        for module in (*PAGE_ROUTES, *other):
            importlib.import_module(f"strata.dashboard.{module}")
        for part in self._parts:
            part.load()

    def extend(self, app: FastAPI, doors: Doors) -> None:
        from strata.dashboard.http.data_routes import add_data_routes  # noqa: PLC0415
        from strata.dashboard.http.goodput_routes import add_goodput_routes  # noqa: PLC0415
        from strata.dashboard.http.lineage_routes import add_lineage_routes  # noqa: PLC0415
        from strata.dashboard.http.login import add_login  # noqa: PLC0415 - imports FastAPI
        from strata.dashboard.http.pages import ApiHeaders, Pages, read_files  # noqa: PLC0415
        from strata.dashboard.http.routes import add_routes  # noqa: PLC0415
        from strata.dashboard.http.run import add_run  # noqa: PLC0415
        from strata.dashboard.http.server_routes import add_server_routes  # noqa: PLC0415
        from strata.dashboard.http.sessions import Sessions  # noqa: PLC0415
        from strata.dashboard.http.time_routes import add_time_routes  # noqa: PLC0415
        from strata.dashboard.live.broadcast import Broadcast  # noqa: PLC0415
        from strata.dashboard.studies.routes import add_studies  # noqa: PLC0415
        from strata.dashboard.studies.source import Studies  # noqa: PLC0415 - imports numpy

        assert self._engine is not None, "started"
        assert self._sampler is not None, "started"
        self._broadcast = Broadcast(self._engine, self._sampler)
        add_login(doors, Sessions(self._engine.metrics.now_s))
        add_routes(doors, self._engine, self._sampler, self._broadcast)
        add_goodput_routes(doors.guarded, self._engine, self._sampler, self._record)
        add_data_routes(doors.guarded, self._engine, self._sampler)
        add_server_routes(doors.guarded, self._engine)
        add_time_routes(doors.guarded, self._engine, self._sampler)
        add_lineage_routes(doors.guarded, self._engine, self._record)
        add_run(doors, self._run)
        add_studies(doors, self._studies or Studies())
        for part in self._parts:
            part.add_to(doors.guarded)
        app.router.default = Pages(read_files(self._static), doors, app.router.default)
        app.add_middleware(ApiHeaders)

    async def stop(self) -> None:
        for part in self._parts:
            part.close()
        if self._broadcast is not None:
            await self._broadcast.stop()
        if self._sampler is not None:
            await self._sampler.stop()


def history_of(state: str) -> Path | None:
    """Return the file of the history for a coordinator's `state`; None if the state is not a file."""
    from strata.coordinator.journal.open import file_of  # noqa: PLC0415 - imports SQLAlchemy

    journal = file_of(state)
    return None if journal is None else path_beside(journal)
