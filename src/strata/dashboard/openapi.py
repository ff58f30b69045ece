"""Print the OpenAPI description of the coordinator with the dashboard: `python -m strata.dashboard.openapi`.

With the argument `explorer`, that of the checkpoint explorer. `web/` generates its types from both; no server is
started.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from fastapi import FastAPI

from strata._version import __version__
from strata.clock import SystemClock
from strata.coordinator.config import CoordinatorConfig
from strata.coordinator.http import make_app
from strata.coordinator.journal import MemoryJournal
from strata.coordinator.serve.admission import AdmissionControl
from strata.coordinator.serve.backend import EngineBackend
from strata.coordinator.serve.engine import Engine
from strata.coordinator.serve.service import METHODS
from strata.coordinator.serve.session import SessionHub
from strata.dashboard.explorer.places import Places
from strata.dashboard.explorer.routes import make_router
from strata.dashboard.extension import Dashboard
from strata.transport.tokens import Guard


async def describe() -> dict[str, Any]:
    config, clock, guard = CoordinatorConfig(), SystemClock(), Guard()
    engine = Engine(MemoryJournal(), config, clock)
    hub = SessionHub(EngineBackend(engine), METHODS, AdmissionControl(guard, config.limits, clock), engine.metrics)
    dashboard = Dashboard()
    dashboard.start(engine, hub)
    try:
        return make_app(engine, hub, guard, (dashboard,)).openapi()
    finally:
        await dashboard.stop()
        await engine.stop()


def describe_explorer() -> dict[str, Any]:
    router = make_router(Places())
    try:
        app = FastAPI(title="Strata explorer", version=__version__)
        app.include_router(router)
        return app.openapi()
    finally:
        router.close()


def main() -> None:
    found = describe_explorer() if sys.argv[1:] == ["explorer"] else asyncio.run(describe())
    json.dump(found, sys.stdout, indent=2, sort_keys=True)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
