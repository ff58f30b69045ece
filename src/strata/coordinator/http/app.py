"""The HTTP API and `/metrics`: read-only, with the same tokens as gRPC.

Every answer is durable. Lists are filtered and paged before any item is built, so a page costs only its own items.
`problems.py` answers errors.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request, Response

from strata import errors
from strata._version import __version__
from strata.coordinator.http import exposition, views
from strata.coordinator.http import models as m
from strata.coordinator.http.access import make_doors
from strata.coordinator.http.checks import BodyLimit, HostCheck, RateLimit, own_names
from strata.coordinator.http.problems import PROBLEMS, add_handlers, refuse_host
from strata.coordinator.state.checkpoints import Attempt
from strata.coordinator.state.events import CheckpointKind  # noqa: TC001 - evaluated at run time
from strata.coordinator.state.membership import WorkerStateName  # noqa: TC001 - evaluated at run time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pydantic import BaseModel

    from strata.clock import Clock
    from strata.coordinator.extension import Extension
    from strata.coordinator.serve.engine import Engine
    from strata.coordinator.serve.session import SessionHub
    from strata.coordinator.state.core import Core
    from strata.transport.tokens import Guard

log = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item", bound="BaseModel")

MAX_LIMIT = 1_000
MAX_OFFSET = 2**53
MAX_READERS = 4
"""Threads that may read the journal at the same time."""
SIZE_TIMEOUT_S = 2.0
QUERY_TIMEOUT_S = 10.0
NUM_ATTEMPTS = 2
"""A read whose batch failed to commit sees the state before that batch on the second attempt."""

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="The maximum number of items.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="The number of items to skip.")]
JobId = Annotated[str | None, Query(min_length=1, max_length=128, description="Only this job.")]
WorkerId = Annotated[str | None, Query(min_length=1, max_length=128, description="Only this worker.")]


def make_app(engine: Engine, hub: SessionHub, guard: Guard, extensions: Sequence[Extension] = ()) -> FastAPI:
    app = FastAPI(
        title="Strata coordinator",
        version=__version__,
        description="Membership, shards, barriers and checkpoints of jobs. Read-only; every answer is durable.",
        docs_url=None,
        redoc_url=None,
    )

    rate_limit = RateLimit(engine.config.limits)

    def admit(request: Request) -> None:
        rate_limit.admit(request.client.host if request.client else "", engine.metrics.now_s())

    doors = make_doors(guard, admit, hosts=engine.config.security.hosts, problems=PROBLEMS)
    app.include_router(_health(engine))
    _add_state(doors.guarded, engine, hub, guard)
    _add_events(doors.guarded, engine)
    _add_metrics(doors.guarded, engine, hub, guard)
    for extension in extensions:
        extension.extend(app, doors)
    app.include_router(doors.guarded)
    app.include_router(doors.open)
    add_handlers(app)
    app.add_middleware(BodyLimit)
    if guard.is_open:
        app.add_middleware(HostCheck, names=own_names(engine.config), refuse=refuse_host)
    return app


def page(found: Iterable[T], make: Callable[[T], Item], *, limit: int, offset: int) -> m.Page[Item]:
    """Build the items of the page, and count the rest."""
    rest = iter(found)
    num_before = sum(1 for _ in itertools.islice(rest, offset))
    items = [make(one) for one in itertools.islice(rest, limit)]
    total = num_before + len(items) + sum(1 for _ in rest)
    end = offset + len(items)
    return m.Page(items=items, total=total, limit=limit, offset=offset, next_offset=end if end < total else None)


# -- health --------------------------------------------------------------------------------------------------------


def _health(engine: Engine) -> APIRouter:
    router = APIRouter()

    @router.get("/api/health", responses={503: {"model": m.Health}}, response_model_exclude_none=True)
    async def health(response: Response) -> m.Health:
        """Return 200 while calls are processed, and 503 with the reason while they are not. Needs no token."""
        if elsewhere := engine.not_leader():
            response.status_code = 503
            return m.Health(status="standby", reason=elsewhere.message)
        if engine.failure is not None:
            response.status_code = 503
            return m.Health(status="refusing", reason=engine.failure.message)
        return m.Health(status="ok", reason=None)

    return router


# -- state ---------------------------------------------------------------------------------------------------------


async def _journal_bytes(engine: Engine) -> int | None:
    try:
        async with asyncio.timeout(SIZE_TIMEOUT_S):
            return await engine.journal_bytes()
    except (TimeoutError, OSError, errors.StrataError):
        return None


def _add_state(router: APIRouter, engine: Engine, hub: SessionHub, guard: Guard) -> None:
    @router.get("/api/status")
    async def status() -> m.Status:
        """Return an overview of the coordinator."""

        def read(core: Core, _clock: Clock) -> tuple[int, int, list[m.StatusJob]]:
            num_workers = sum(len(job.membership.members) for job in core.jobs.values())
            shown = itertools.islice(core.jobs.values(), MAX_LIMIT)
            return len(core.jobs), num_workers, [views.status_job(job) for job in shown]

        num_jobs, num_workers, jobs = await query(engine, read)
        return m.Status(
            version=__version__,
            num_sessions=hub.num_sessions,
            journal_bytes=await _journal_bytes(engine),
            journal_damage=engine.damage.reason if engine.damage else None,
            journal_failure=engine.failure.message if engine.failure else None,
            token_file_problem=guard.file_problem() or None,
            num_jobs=num_jobs,
            num_workers=num_workers,
            requests_per_s=engine.metrics.calls_per_s(),
            jobs=jobs,
        )

    @router.get("/api/jobs")
    async def jobs(job: JobId = None, limit: Limit = 100, offset: Offset = 0) -> m.Page[m.Job]:
        """List jobs in the order of their creation."""
        return await query(engine, lambda core, _at: page(views.jobs(core, job), views.job, limit=limit, offset=offset))

    @router.get("/api/workers")
    async def workers(
        job: JobId = None,
        worker: WorkerId = None,
        state: WorkerStateName | None = None,
        suspect: bool | None = None,
        limit: Limit = 100,
        offset: Offset = 0,
    ) -> m.Page[m.Worker]:
        """List the workers by job and rank."""

        def read(core: Core, clock: Clock) -> m.Page[m.Worker]:
            found = (
                (one.job_id, rank, member)
                for one in views.jobs(core, job)
                for rank, member in one.membership.ranked()
                if worker in (None, member.worker_id)
                and state in (None, member.state)
                and suspect in (None, member.suspect_since_s is not None)
            )
            return page(found, lambda one: views.worker(*one, clock.monotonic_s()), limit=limit, offset=offset)

        return await query(engine, read)

    @router.get("/api/datasets")
    async def datasets(
        job: JobId = None, complete: bool | None = None, limit: Limit = 100, offset: Offset = 0
    ) -> m.Page[m.Dataset]:
        """List datasets and their progress in the current epoch."""

        def read(core: Core, _clock: Clock) -> m.Page[m.Dataset]:
            found = (
                (one.job_id, dataset)
                for one in views.jobs(core, job)
                for dataset in one.shards.datasets.values()
                if complete in (None, dataset.num_done == dataset.spec.num_shards)
            )
            return page(found, lambda one: views.dataset(*one), limit=limit, offset=offset)

        return await query(engine, read)

    @router.get("/api/checkpoints")
    async def checkpoints(
        job: JobId = None,
        state: m.CheckpointState | None = None,
        kind: CheckpointKind | None = None,
        limit: Limit = 100,
        offset: Offset = 0,
    ) -> m.Page[m.Checkpoint]:
        """List the remembered checkpoints, oldest first, then those that are not committed yet."""

        def read(core: Core, _clock: Clock) -> m.Page[m.Checkpoint]:
            found = (
                (one, found)
                for one in views.jobs(core, job)
                for found in views.checkpoints(one)
                if state in (None, "open" if isinstance(found, Attempt) else "committed")
                and kind in (None, (found.spec if isinstance(found, Attempt) else found.checkpoint).type)
            )
            return page(found, lambda one: views.checkpoint(*one), limit=limit, offset=offset)

        return await query(engine, read)

    @router.get("/api/barriers")
    async def barriers(
        job: JobId = None, state: m.BarrierState | None = None, limit: Limit = 100, offset: Offset = 0
    ) -> m.Page[m.Barrier]:
        """List the waiting barriers, and those released in the current generation."""

        def read(core: Core, clock: Clock) -> m.Page[m.Barrier]:
            found = (
                (one, found)
                for one in views.jobs(core, job)
                for found in views.barriers(one)
                if state in (None, "released" if isinstance(found, tuple) else "open")
            )
            return page(found, lambda one: views.barrier(*one, clock.monotonic_s()), limit=limit, offset=offset)

        return await query(engine, read)


# -- events --------------------------------------------------------------------------------------------------------


def _add_events(router: APIRouter, engine: Engine) -> None:
    room = asyncio.Semaphore(MAX_READERS)

    @router.get("/api/events")
    async def events(
        job: JobId = None,
        kind: m.EventKind | None = None,
        worker: WorkerId = None,
        after: Annotated[int, Query(ge=0, le=MAX_OFFSET, description="Start after this entry.")] = 0,
        limit: Limit = 100,
    ) -> m.EventPage:
        """List events with their reasons, oldest first, as far back as the history of the journal reaches."""
        _require_leader(engine)
        async with room:
            found = await asyncio.to_thread(
                views.events, engine.journal, after=after, limit=limit, job_id=job, kind=kind, worker_id=worker
            )
        _require_leader(engine)
        if job is not None and not found.items and not after:  # a dropped job still has a history
            await query(engine, lambda core, _at: core.job(job).job_id)
        return found


def _require_leader(engine: Engine) -> None:
    """Reject a read on a standby, whose journal may be old or missing."""
    if elsewhere := engine.not_leader():
        raise elsewhere


# -- metrics -------------------------------------------------------------------------------------------------------


def _add_metrics(router: APIRouter, engine: Engine, hub: SessionHub, guard: Guard) -> None:
    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Return metrics for Prometheus; see docs/metrics.md. A standby exports no jobs."""
        leading, file_problem = engine.not_leader() is None, guard.file_problem()
        text = exposition.render(
            engine.metrics,
            jobs=engine.core.jobs.values() if leading else (),
            num_sessions=hub.num_sessions,
            num_unannounced=engine.num_unannounced,
            journal_bytes=await _journal_bytes(engine),
            refusing=engine.failure is not None,
            leading=leading,
            token_file_ok=None if file_problem is None else not file_problem,
        )
        return Response(text, media_type=exposition.CONTENT_TYPE)


async def query(engine: Engine, read: Callable[[Core, Clock], T]) -> T:
    """Return the result of `read`, once all state that it saw is durable."""
    for attempt in range(1, NUM_ATTEMPTS + 1):
        answer = await _query_once(engine, read)
        if isinstance(answer, errors.JournalWriteFailed) and attempt < NUM_ATTEMPTS:
            continue
        if isinstance(answer, errors.StrataError):
            raise answer
        return answer
    raise AssertionError("unreachable")


async def _query_once(engine: Engine, read: Callable[[Core, Clock], T]) -> T | errors.StrataError:
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(answer: Any) -> None:
        if not answered.done():  # it may have timed out
            answered.set_result(answer)

    def guarded_read(core: Core, clock: Clock) -> T | errors.StrataError:
        try:
            return read(core, clock)
        except errors.StrataError as error:
            return error
        except Exception as error:
            # Process boundary: other calls run in the same batch and must not fail.
            log.exception("unexpected error in an HTTP request")
            return errors.StrataError(f"the coordinator failed on this request ({type(error).__name__}); see its log")

    engine.call(lambda core, clock: lambda: guarded_read(core, clock), done)
    try:
        async with asyncio.timeout(QUERY_TIMEOUT_S):
            return await answered  # type: ignore[no-any-return]
    except TimeoutError:
        return errors.CoordinatorUnavailable(f"the journal did not respond within {QUERY_TIMEOUT_S} s; try again")
