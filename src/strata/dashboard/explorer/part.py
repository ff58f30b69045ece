"""The explorer as a part of a run's dashboard: it shows the place where the run saves."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import APIRouter

    from strata.dashboard.explorer.limits import ExplorerConfig
    from strata.dashboard.explorer.places import Places
    from strata.dashboard.explorer.routes import ExplorerRouter


class ExplorerPart:
    """Implements `Part`. The place is opened when the page is first served: most runs are never looked at."""

    def __init__(self, location: str, *, label: str, storage_options: Mapping[str, str]) -> None:
        """`location`: a directory, which need not exist yet, or a URL."""
        self._location, self._label, self._options = location, label, storage_options
        self._places: Places | None = None
        self._router: ExplorerRouter | None = None

    def load(self) -> None:
        importlib.import_module("strata.dashboard.explorer.routes")  # with numpy and the checkpoints

    def add_to(self, router: APIRouter) -> None:
        from strata.dashboard.explorer.places import Places, open_checkpoints  # noqa: PLC0415 - imports numpy
        from strata.dashboard.explorer.routes import make_router  # noqa: PLC0415 - imports FastAPI

        self._places = Places([open_checkpoints(self._location, label=self._label, storage_options=self._options)])
        self._router = make_router(self._places)
        router.include_router(self._router)

    def close(self) -> None:
        if self._router is not None and self._places is not None:
            self._router.close()
            self._places.close()


class OpenPlaces:
    """Implements `Part` for places that are open already."""

    def __init__(self, places: Places, config: ExplorerConfig) -> None:
        self._places, self._config = places, config
        self._router: ExplorerRouter | None = None

    def load(self) -> None:
        importlib.import_module("strata.dashboard.explorer.routes")

    def add_to(self, router: APIRouter) -> None:
        from strata.dashboard.explorer.routes import make_router  # noqa: PLC0415 - imports FastAPI

        self._router = make_router(self._places, config=self._config)
        router.include_router(self._router)

    def close(self) -> None:
        if self._router is not None:
            self._router.close()
        self._places.close()


class NoPlaces:
    """Implements `Part` for a coordinator that does not know where its jobs save: the page finds no place to read."""

    def load(self) -> None:
        importlib.import_module("strata.dashboard.explorer.models")

    def add_to(self, router: APIRouter) -> None:
        from strata.dashboard.explorer.models import PlaceList  # noqa: PLC0415 - imports pydantic

        @router.get("/api/explorer/places", response_model=PlaceList)
        async def places() -> object:
            """Return an empty list: this server reads no checkpoints."""
            return PlaceList(items=[])

    def close(self) -> None:
        pass
