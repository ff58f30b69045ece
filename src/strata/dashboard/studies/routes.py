"""The routes of studies, `/api/studies` and below `/api/study`. Answers are bounded, and computed on another thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from fastapi import Body, Depends, Query, Request

from strata.coordinator.http.app import MAX_OFFSET
from strata.coordinator.http.models import Page
from strata.dashboard.studies import figures
from strata.dashboard.studies import models as m
from strata.errors import ConfigError, InvalidArgument, RunFailed
from strata.transport.tokens import Role, require
from strata.tune.state.events import MAX_TRIALS
from strata.tune.state.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import APIRouter

    from strata.coordinator.http.access import Doors
    from strata.dashboard.studies.source import Studies, StudyNow
    from strata.launch.control import TrialOrder

T = TypeVar("T")
MAX_CHOSEN = 50
MAX_NAME_LENGTH = 256

StudyId = Annotated[str, Query(max_length=128, description="Id of the study; the first one by default.")]
Metric = Annotated[
    str, Query(max_length=MAX_NAME_LENGTH, description="A reported metric; the first objective by default.")
]
TrialNumbers = Annotated[
    list[Annotated[int, Query(ge=0, le=MAX_TRIALS)]],
    Query(max_length=MAX_CHOSEN, description="Trials to include in any case."),
]
State = Annotated[TrialState | None, Query(description="Only trials in this state.")]
Text = Annotated[str, Query(max_length=200, description="Only trials with this in their configuration or reason.")]
SortBy = Annotated[
    Literal["trial", "state", "value", "step", "duration", "config"], Query(description="What to sort by.")
]
SortName = Annotated[
    str, Query(max_length=MAX_NAME_LENGTH, description="The metric of `value`, or the parameter of `config`.")
]
Descending = Annotated[bool, Query(description="Largest first.")]
RowLimit = Annotated[int, Query(ge=1, le=500, description="The maximum number of trials.")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="The number of trials to skip.")]
CurveLimit = Annotated[int, Query(ge=1, le=200, description="The maximum number of trials.")]
PointLimit = Annotated[int, Query(ge=4, le=1_000, description="The maximum number of points of a curve.")]
ResultLimit = Annotated[int, Query(ge=2, le=5_000, description="The maximum number of results.")]
LineLimit = Annotated[int, Query(ge=2, le=2_000, description="The maximum number of trials.")]


def add_studies(doors: Doors, studies: Studies) -> None:
    """Add the routes. Without a study, the list is empty, and the others are refused."""
    router, access = doors.guarded, doors.access
    _add_trials(router, studies)
    _add_pictures(router, studies)
    _add_orders(doors, studies)

    @router.get("/api/studies")
    async def all_studies() -> m.StudyList:
        """List the studies of this server."""
        return m.StudyList(items=[m.StudyRef(study=each.id, name=each.directory.name) for each in studies.all()])

    @router.get("/api/study")
    async def study_info(request: Request, study: StudyId = "") -> m.StudyInfo:
        """Return a study as its journal has it now."""
        source = studies.get(study)
        may_command = studies.takes_orders and access.role_of(request) >= Role.ADMIN
        return await _looked(studies, study, lambda now: figures.info(source, now, may_command=may_command))


async def _looked(studies: Studies, study: str, look: Callable[[StudyNow], T]) -> T:
    source = studies.get(study)

    def work() -> T:
        with source.now() as now:
            return look(now)

    return await asyncio.to_thread(work)


def _add_orders(doors: Doors, studies: Studies) -> None:
    async def admin(request: Request) -> None:
        require(doors.access.role_of(request), Role.ADMIN, request.url.path)

    async def carry_out(body: m.TrialOrderRequest, order: TrialOrder) -> None:
        source = studies.get(body.study)
        if not studies.takes_orders:
            raise InvalidArgument("this server only reads studies; open the page that `strata tune` prints")
        await asyncio.to_thread(source.order, body.number, order)

    @doors.guarded.post("/api/study/trial/stop", dependencies=[Depends(admin)], status_code=204)
    async def stop(body: Annotated[m.TrialOrderRequest, Body()]) -> None:
        """Stop a trial that has started, for good: it ends as pruned. The order is in the journal then."""
        await carry_out(body, "stop")

    @doors.guarded.post("/api/study/trial/requeue", dependencies=[Depends(admin)], status_code=204)
    async def requeue(body: Annotated[m.TrialOrderRequest, Body()]) -> None:
        """Let a running trial save and start again from its checkpoint. The order is in the journal then."""
        await carry_out(body, "requeue")


def _add_trials(router: APIRouter, studies: Studies) -> None:
    @router.get("/api/study/trials")
    async def trials(
        study: StudyId = "",
        state: State = None,
        text: Text = "",
        sort: SortBy = "trial",
        name: SortName = "",
        desc: Descending = False,
        limit: RowLimit = 50,
        offset: Offset = 0,
    ) -> Page[m.StudyTrial]:
        """List trials. Those without the value to sort by come last."""

        def look(now: StudyNow) -> Page[m.StudyTrial]:
            found = figures.listed(now, state=state, text=text, sort=sort, name=name, is_descending=desc)
            front = figures.best_numbers(now)
            items = [figures.row(now, each, front) for each in found[offset : offset + limit]]
            end = offset + len(items)
            return Page(
                items=items,
                total=len(found),
                limit=limit,
                offset=offset,
                next_offset=end if items and end < len(found) else None,
            )

        return await _looked(studies, study, look)

    @router.get("/api/study/trial")
    async def trial(number: Annotated[int, Query(ge=0, le=MAX_TRIALS)], study: StudyId = "") -> m.StudyTrial | None:
        """Return one trial; null if the study has none of this number."""

        def look(now: StudyNow) -> m.StudyTrial | None:
            found = now.state.trials.get(number)
            return None if found is None else figures.row(now, found, figures.best_numbers(now))

        return await _looked(studies, study, look)


def _add_pictures(router: APIRouter, studies: Studies) -> None:
    @router.get("/api/study/curves")
    async def curves(
        study: StudyId = "",
        metric: Metric = "",
        trial: TrialNumbers = [],  # noqa: B006 - FastAPI copies it
        max_trials: CurveLimit = 50,
        max_points: PointLimit = 200,
    ) -> m.StudyCurves:
        """Return the reports of trials over their steps: those asked for, then running ones, then the best."""
        return await _looked(
            studies,
            study,
            lambda now: figures.curves(now, metric=metric, chosen=trial, max_trials=max_trials, max_points=max_points),
        )

    @router.get("/api/study/history")
    async def history(study: StudyId = "", metric: Metric = "", max_points: ResultLimit = 1_000) -> m.StudyHistory:
        """Return the results in the order in which trials ended, and each improvement."""
        return await _looked(studies, study, lambda now: figures.history(now, metric=metric, max_points=max_points))

    @router.get("/api/study/parallel")
    async def parallel(
        study: StudyId = "",
        metric: Metric = "",
        trial: TrialNumbers = [],  # noqa: B006 - FastAPI copies it
        max_trials: LineLimit = 400,
    ) -> m.StudyParallel:
        """Return finished trials as lines through their parameters."""
        return await _looked(
            studies, study, lambda now: figures.parallel(now, metric=metric, chosen=trial, max_trials=max_trials)
        )

    @router.get("/api/study/pareto")
    async def pareto(
        study: StudyId = "", x: Metric = "", y: Metric = "", max_points: ResultLimit = 1_000
    ) -> m.StudyPareto:
        """Return two metrics of finished trials, and which of them are on the Pareto front."""
        return await _looked(studies, study, lambda now: figures.pareto(now, x=x, y=y, max_points=max_points))

    @router.get("/api/study/importances")
    async def importances(study: StudyId = "", metric: Metric = "") -> m.StudyImportances:
        """Return how much each parameter matters, for one objective or for all of them."""
        source = studies.get(study)
        await _looked(studies, study, lambda now: figures.check_objective(now.state, metric))
        try:
            found, num_trials = await asyncio.to_thread(source.importances, metric or None)
        except (ConfigError, RunFailed) as error:  # Optuna is not installed, or too few trials have finished
            return m.StudyImportances(items=[], num_trials=0, problem=error.message)
        items = [m.StudyImportance(name=name, importance=share) for name, share in found.items()]
        return m.StudyImportances(items=items, num_trials=num_trials, problem="")
