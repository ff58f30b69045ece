"""The route of the page of parameter servers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Query

from strata.coordinator.http.app import MAX_OFFSET, page, query
from strata.coordinator.http.models import Page
from strata.coordinator.state import server_figures as f
from strata.dashboard.http import page_models as m
from strata.dashboard.http.goodput_routes import RequiredJob  # noqa: TC001 - evaluated at run time
from strata.dashboard.sample import server_figures

if TYPE_CHECKING:
    from fastapi import APIRouter

    from strata.clock import Clock
    from strata.coordinator.serve.engine import Engine
    from strata.coordinator.state.core import Core
    from strata.coordinator.state.membership import Member

MAX_SERVERS = 200
Limit = Annotated[int, Query(ge=1, le=MAX_SERVERS, description="The maximum number of servers.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="The number of servers to skip.")]


def add_server_routes(router: APIRouter, engine: Engine) -> None:
    @router.get("/api/servers")
    async def servers(job: RequiredJob, limit: Limit = 100, offset: Offset = 0) -> m.JobServers:
        """Return the parameter servers of a job, with what each has measured, and their total."""

        def read(core: Core, clock: Clock) -> m.JobServers:
            found = sorted(
                (
                    (number, each)
                    for each in core.job(job).membership.members.values()
                    if (number := _number(each)) >= 0
                ),
                key=lambda one: one[0],
            )
            total = f.total(figures for _, each in found if (figures := server_figures(each)) is not None)
            now_s = clock.monotonic_s()
            items = page(found, lambda one: _server(*one, now_s), limit=limit, offset=offset)
            shown = None if not found else m.ServerFigures(**_fields(total))
            return m.JobServers(job_id=job, total=shown, servers=Page[m.Server](**dict(items)))

        return await query(engine, read)


def _number(member: Member) -> int:
    """Return the number of a server; -1 for other workers."""
    series = member.metrics.get(f.SERVER)
    return -1 if series is None or not math.isfinite(series.last) else int(series.last)


def _server(number: int, member: Member, now_s: float) -> m.Server:
    return m.Server(
        number=number,
        worker_id=member.worker_id,
        step=member.step,
        silent_s=max(now_s - member.last_seen_s, 0.0),
        suspect=member.suspect_since_s is not None,
        **_fields(server_figures(member)),
    )


def _fields(figures: f.ServerFigures | None) -> dict[str, Any]:
    plain = {} if figures is None else figures.as_plain()
    return {name: plain.get(name) for name in m.ServerFigures.model_fields}
