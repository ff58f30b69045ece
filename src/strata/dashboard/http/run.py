"""The routes of a run's own page: logs of its workers, and orders, which need the role `admin`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import Body, Depends, Query, Request

from strata.dashboard.http import models as m
from strata.dashboard.run import MAX_LINES
from strata.errors import ConfigError, InvalidArgument
from strata.transport.tokens import Role, require

if TYPE_CHECKING:
    from strata.coordinator.http.access import Doors
    from strata.dashboard.run import RunControl

MAX_RANK = 1 << 20
Rank = Annotated[int, Query(ge=0, le=MAX_RANK, description="The rank that the launcher gave the worker.")]
Attempt = Annotated[int | None, Query(ge=0, le=MAX_RANK, description="The attempt; the newest by default.")]
Lines = Annotated[int, Query(ge=1, le=MAX_LINES, description="The maximum number of lines, from the end.")]


def add_run(doors: Doors, run: RunControl | None) -> None:
    """Add the routes. Without a run, `/api/run` is null, and others are refused. A run that is over has no orders."""
    access = doors.access

    async def admin(request: Request) -> None:
        require(access.role_of(request), Role.ADMIN, request.url.path)

    def known() -> RunControl:
        if run is None:
            raise InvalidArgument("this coordinator runs no workers itself; open the page that `strata run` prints")
        return run

    @doors.guarded.get("/api/run")
    async def info(request: Request) -> m.RunInfo | None:
        """Return the run whose page this is; null for a coordinator of its own."""
        if run is None:
            return None
        may_command = run.takes_orders and access.role_of(request) >= Role.ADMIN
        return await asyncio.to_thread(_info, run, may_command=may_command)

    @doors.guarded.get("/api/run/log")
    async def log(rank: Rank, attempt: Attempt = None, lines: Lines = 200) -> m.WorkerLog:
        """Return the end of a worker's log."""
        found = await asyncio.to_thread(known().log, rank, attempt, lines)
        return m.WorkerLog(rank=found.rank, attempt=found.attempt, attempts=list(found.attempts), lines=found.lines)

    if run is not None and not run.takes_orders:
        return

    @doors.guarded.post("/api/run/stop", dependencies=[Depends(admin)], status_code=204)
    async def stop(body: Annotated[m.StopRequest, Body()]) -> None:
        """Stop the run: after a checkpoint, or now."""
        await _order(known().stop, is_now=body.is_now)

    @doors.guarded.post("/api/run/scale", dependencies=[Depends(admin)], status_code=204)
    async def scale(body: Annotated[m.ScaleRequest, Body()]) -> None:
        """Change the number of workers: they save, and continue with another world size."""
        await _order(known().scale, workers=body.workers)

    @doors.guarded.post("/api/run/stacks", dependencies=[Depends(admin)], status_code=204)
    async def stacks(body: Annotated[m.StacksRequest, Body()]) -> None:
        """Write the stacks of a worker's threads to its log; the worker continues."""
        await _order(known().dump_stacks, rank=body.rank)


def _info(run: RunControl, *, may_command: bool) -> m.RunInfo:
    least, most = run.range
    return m.RunInfo(
        name=run.name,
        min_workers=least,
        max_workers=most,
        num_workers=run.num_workers,
        may_command=may_command,
        live_page=run.live_page(),
    )


async def _order(send: object, **arguments: object) -> None:
    assert callable(send)
    try:
        await asyncio.to_thread(send, **arguments)
    except ConfigError as error:  # the agent refuses: the number, or that it is about to end
        raise InvalidArgument(error.message, field=next(iter(arguments))) from error
