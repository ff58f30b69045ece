"""The routes of the live dashboard: overview, series, history, live updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Header, Query, Request, Response

from strata.coordinator.http.app import MAX_OFFSET
from strata.coordinator.http.models import Page
from strata.dashboard.http import models as m
from strata.dashboard.http import overview as o
from strata.dashboard.live.stream import EventStream
from strata.dashboard.sample import Spread, unit_of
from strata.errors import CoordinatorUnavailable, InvalidArgument, StrataError
from strata.transport.tokens import Role, require

if TYPE_CHECKING:
    from strata.coordinator.http.access import Access, Doors
    from strata.coordinator.serve.engine import Engine
    from strata.dashboard.history.rings import Bucket
    from strata.dashboard.live.broadcast import Broadcast
    from strata.dashboard.sample import JobSample, Sample
    from strata.dashboard.sampler import Sampler

MAX_JOBS = 100
MAX_NAMES = 32
MAX_POINTS = 2_000
MAX_NAME_LENGTH = 160
"""A metric's id has up to 128 characters, and a prefix."""
STALE_S = 30.0
"""A sample that is older is not shown: values that do not move would look like a job that does not."""
MAX_CACHED = 16
"""Pages of the overview that are kept until the next sample."""

Limit = Annotated[int, Query(ge=1, le=MAX_JOBS, description="The maximum number of jobs.")]
SeriesLimit = Annotated[int, Query(ge=1, le=1_000, description="The maximum number of series.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="The number of items to skip.")]
Job = Annotated[str, Query(max_length=128, description="The job; empty for the coordinator itself.")]
JobFilter = Annotated[str | None, Query(max_length=128, description="Only this job; empty for the coordinator.")]
Names = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=MAX_NAME_LENGTH)]],
    Query(min_length=1, max_length=MAX_NAMES, description="The series; repeat it for several."),
]
Time = Annotated[float, Query(ge=0, le=2**33, description="Seconds since 1970.")]
PointLimit = Annotated[int, Query(ge=2, le=MAX_POINTS, description="The maximum number of points of a series.")]
Cursor = Annotated[str, Query(max_length=64, description="The last message that the client has; empty to start now.")]
LastEventId = Annotated[str, Header(max_length=64, description="The same, sent by browsers that reconnect.")]

_LIVE = "A stream of server-sent events. The model lists the data of each event by its name; no event contains all."


class Overviews:
    """The serialised pages of the newest overview."""

    def __init__(self, sampler: Sampler, broadcast: Broadcast) -> None:
        self._sampler = sampler
        self._broadcast = broadcast
        self._of: Sample | None = None
        self._pages: dict[tuple[int, int], bytes] = {}

    def page(self, sample: Sample, limit: int, offset: int) -> bytes:
        if sample is not self._of:
            self._of, self._pages = sample, {}
        found = self._pages.get((limit, offset))
        if found is None:
            made = o.overview(
                sample,
                job=self._job,
                verdict=self._sampler.health(sample),
                cursor=self._broadcast.feed.cursor,
                ended=self._sampler.ended,
                limit=limit,
                offset=offset,
            )
            found = made.model_dump_json().encode()
            if len(self._pages) < MAX_CACHED:
                self._pages[limit, offset] = found
        return found

    def _job(self, job: JobSample) -> m.OverviewJob:
        values = self._sampler.values_of(job) if job.workers else {}
        return o.with_values(o.summary(job, values, self._sampler.health_of(job)), values)


async def current(engine: Engine, sampler: Sampler) -> Sample:
    """Return the newest sample.

    Raises:
        NotLeader: Another coordinator leads.
        CoordinatorUnavailable: The journal does not respond.
    """
    if elsewhere := engine.not_leader():
        raise elsewhere
    sample = await sampler.current()
    if sample is None or sampler.age_s(sample) > STALE_S:
        raise engine.failure or CoordinatorUnavailable("there is no recent sample of the jobs; try again")
    return sample


def add_routes(doors: Doors, engine: Engine, sampler: Sampler, broadcast: Broadcast) -> None:
    overviews = Overviews(sampler, broadcast)
    router, access = doors.guarded, doors.access

    @router.get("/api/overview", response_class=Response, responses={200: {"model": m.Overview}})
    async def overview(limit: Limit = 20, offset: Offset = 0) -> Response:
        """Return what a first look needs: health, jobs, workers by state, newest values. At most a second old."""
        sample = await current(engine, sampler)
        return Response(overviews.page(sample, limit, offset), media_type="application/json")

    @router.get("/api/series")
    async def series(job: JobFilter = None, limit: SeriesLimit = 100, offset: Offset = 0) -> Page[m.SeriesInfo]:
        """List the series that have a history, by job and name."""
        await current(engine, sampler)
        keys = sampler.store.keys(job)
        items = [_info(sampler, *key) for key in keys[offset : offset + limit]]
        end = offset + len(items)
        return Page(
            items=items, total=len(keys), limit=limit, offset=offset, next_offset=end if end < len(keys) else None
        )

    @router.get("/api/history")
    async def history(
        name: Names, job: Job = "", since_s: Time = 0.0, until_s: Time = float(2**33), max_points: PointLimit = 500
    ) -> m.History:
        """Return series over a range of time, in the finest resolution that fits into `max_points`."""
        await current(engine, sampler)
        if since_s > until_s:
            raise InvalidArgument(f"since_s={since_s} is after until_s={until_s}; exchange them", field="since_s")
        found = [_points(sampler, job, each, since_s, until_s, max_points) for each in name]
        return m.History(job_id=job, cursor=broadcast.feed.cursor, series=found)

    @router.get(
        "/api/live",
        response_class=Response,
        responses={200: {"model": m.LiveEvents, "description": _LIVE, "content": {EventStream.media_type: {}}}},
    )
    async def live(request: Request, cursor: Cursor = "", last_event_id: LastEventId = "") -> Response:
        """Stream what changes as server-sent events, from a cursor on."""
        await current(engine, sampler)
        return broadcast.stream(last_event_id or cursor, lambda: _may_read(access, request) and not engine.not_leader())


def _may_read(access: Access, request: Request) -> bool:
    """Whether the token or session of a request is still valid."""
    try:
        require(access.role_of(request), Role.READER, request.url.path)
    except StrataError:
        return False
    return True


def _info(sampler: Sampler, job_id: str, name: str) -> m.SeriesInfo:
    series = sampler.store.get(job_id, name)
    assert series is not None
    newest, oldest_s = series.newest(), series.oldest_s()
    assert newest is not None
    assert oldest_s is not None
    return m.SeriesInfo(
        job_id=job_id,
        name=name,
        unit=unit_of(name),
        last=o.series_value(name, Spread(newest.min, newest.mean, newest.max)),
        last_at_s=newest.start_s,
        first_at_s=oldest_s,
    )


def _points(
    sampler: Sampler, job_id: str, name: str, since_s: float, until_s: float, max_points: int
) -> m.SeriesPoints:
    series = sampler.store.get(job_id, name)
    interval_s: int = 0
    buckets: list[Bucket] = []
    if series is not None:
        interval_s, buckets = series.points(since_s=since_s, until_s=until_s, max_points=max_points)
    return m.SeriesPoints(
        name=name,
        unit=unit_of(name),
        interval_s=interval_s,
        t=[each.start_s for each in buckets],
        min=[each.min for each in buckets],
        mean=[each.mean for each in buckets],
        max=[each.max for each in buckets],
    )
