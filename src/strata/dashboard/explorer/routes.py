"""The routes of the explorer, under `/api/explorer`.

`make_router` needs no coordinator. The application that includes the router guards it. Errors are translated here,
because a damaged checkpoint is no failure of the server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute

from strata import errors
from strata.checkpoint.tools import export as exports
from strata.clock import SystemClock
from strata.coordinator.http.models import ErrorBody, Page
from strata.coordinator.http.problems import error_response
from strata.dashboard.explorer import models as m
from strata.dashboard.explorer import tree, views
from strata.dashboard.explorer.contents import PlainFile, SavedCheckpoint
from strata.dashboard.explorer.explorer import Explorer, TensorQuery
from strata.dashboard.explorer.limits import ExplorerConfig
from strata.dashboard.explorer.workroom import Tasks, Workroom
from strata.storage import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from strata.clock import Clock
    from strata.dashboard.explorer.explorer import OpenCheckpoint
    from strata.dashboard.explorer.limits import Budget
    from strata.dashboard.explorer.places import Places

log = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")

PREFIX = "/api/explorer"
MAX_LIMIT = 1_000
MAX_BINS = 1_024
MAX_CELLS = 256
"""Rows and columns of a heat map."""
MAX_POINTS = 2_048
READ_BYTES = 4 << 20
"""Sent at a time when a plain file is downloaded."""
_NOT_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")

STATUS_OF: dict[type[errors.StrataError], int] = {
    errors.StrataError: 500,
    errors.InvalidArgument: 422,
    errors.ReadTooLarge: 413,
    errors.LimitExceeded: 429,
    errors.TooManyReads: 429,
    errors.NoCheckpoint: 404,
    errors.CheckpointError: 409,
    errors.ConfigError: 422,
    errors.StorageError: 503,
    errors.ObjectMissing: 404,
    errors.BucketMissing: 404,
    errors.TransferCancelled: 409,
}
"""An error has the status of its nearest ancestor in this table."""
_MEANINGS = {
    404: "The place, the checkpoint or the tensor does not exist.",
    409: "The checkpoint is damaged or incomplete; the message names the file and the tensor.",
    413: "Reading it would exceed a limit of bytes or time; the message names the limit.",
    422: "A parameter is invalid.",
    429: "Too many requests wait for a read.",
    503: "The store does not answer.",
}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody, "description": message} for code, message in _MEANINGS.items()
}

PlaceId = Annotated[str, Query(min_length=1, max_length=200, description="The id of a place.")]
CheckpointId = Annotated[str, Query(min_length=1, max_length=1_000, description="The id of a checkpoint, or a file.")]
Name = Annotated[str, Query(max_length=4_096, description="The full name of a tensor.")]
Under = Annotated[str | None, Query(max_length=4_096, description="The path of a group; omit it for the top.")]
Search = Annotated[str, Query(max_length=200, description="A part of the name, or a pattern with * and ?.")]
AgainstPlace = Annotated[str | None, Query(max_length=200, description="The place of `against`; by default the same.")]
Against = Annotated[str, Query(min_length=1, max_length=1_000, description="The older checkpoint.")]
MaybeAgainst = Annotated[str | None, Query(min_length=1, max_length=1_000, description="The older checkpoint.")]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="The maximum number of items.")]
Offset = Annotated[int, Query(ge=0, le=2**53, description="The number of items to skip.")]
NumBins = Annotated[int, Query(ge=1, le=MAX_BINS)]
Numbers = Annotated[str | None, Query(max_length=1_500, pattern=r"^(\d{1,18}(,\d{1,18})*)?$", description="As 0,128.")]
Edge = Annotated[float | None, Query(allow_inf_nan=False)]


class ExplorerRoute(APIRoute):
    """Turns errors of checkpoints and stores into answers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except errors.StrataError as error:
                if isinstance(error, errors.CoordinatorError):
                    raise  # of the application's own guards
                code = next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)
                return error_response(code, type(error).__name__, error.message, error.field)

        return handle_errors


async def require_json(request: Request) -> None:
    """Refuse a command that a form of another site could send: such a form cannot set this content type."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" or request.headers.get("sec-fetch-site", "same-origin") not in (
        "same-origin",
        "none",
    ):
        raise errors.InvalidArgument("send commands from this site, with Content-Type: application/json", field="body")


class _Service:
    """What the routes share."""

    def __init__(self, places: Places, config: ExplorerConfig, clock: Clock) -> None:
        self.explorer = Explorer(places, config)
        self.places, self.config = places, config
        self._lists = Workroom(config, clock, name="list")
        self._reads = Workroom(config, clock, name="read")
        self.tasks = Tasks(config, clock)
        self.export_room = asyncio.Semaphore(config.max_exports)

    async def list(self, request: Request, work: Callable[[Budget], T]) -> T:
        """Run work that reads manifests and headers only."""
        return await self._lists.run(work, request.is_disconnected)

    async def read(self, request: Request, work: Callable[[Budget], T]) -> T:
        """Run work that reads data; it does not hold up lists."""
        return await self._reads.run(work, request.is_disconnected)

    def sides(
        self, place: str, id: str, against_place: str | None, against: str
    ) -> tuple[OpenCheckpoint, OpenCheckpoint]:
        """Open the old and the new checkpoint."""
        return self.explorer.open(against_place or place, against), self.explorer.open(place, id)

    def close(self) -> None:
        self._lists.close()
        self._reads.close()
        self.tasks.close()


def make_router(places: Places, *, config: ExplorerConfig | None = None, clock: Clock | None = None) -> ExplorerRouter:
    """Return the routes. `close` ends their threads."""
    service = _Service(places, config or ExplorerConfig(), clock or SystemClock())
    router = ExplorerRouter(service, prefix=PREFIX, route_class=ExplorerRoute, responses=_PROBLEMS, tags=["explorer"])
    _add_checkpoints(router, service)
    _add_tensors(router, service)
    _add_views(router, service)
    _add_follow(router, service)
    _add_comparisons(router, service)
    _add_commands(router, service)
    return router


class ExplorerRouter(APIRouter):
    """A router that knows its threads."""

    def __init__(self, service: _Service, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._service = service

    def close(self) -> None:
        """End the threads; requests under way are cancelled."""
        self._service.close()


# -- checkpoints ---------------------------------------------------------------------------------------------------


def _add_checkpoints(router: APIRouter, service: _Service) -> None:
    @router.get("/places")
    async def places() -> m.PlaceList:
        """List the places that can be explored."""
        found = service.places.all()
        return m.PlaceList(
            items=[
                m.ExplorerPlace(place=one.id, label=one.label, location=one.location, kind=one.kind) for one in found
            ]
        )

    @router.get("/checkpoints")
    async def checkpoints(
        request: Request,
        place: PlaceId,
        order: Annotated[str, Query(pattern="^(newest|oldest)$", description="Which comes first.")] = "newest",
        limit: Limit = 100,
        offset: Offset = 0,
    ) -> m.ExplorerCheckpointPage:
        """List the checkpoints of a place, with their lineage."""

        def work(_budget: Budget) -> m.ExplorerCheckpointPage:
            entries, problems = service.explorer.timeline(place)
            chosen = entries[::-1] if order == "newest" else entries
            items = [views.checkpoint(one) for one in chosen[offset : offset + limit]]
            return m.ExplorerCheckpointPage(
                **views.page_of(len(entries), items, limit, offset), problems=dict(problems)
            )

        return await service.list(request, work)

    @router.get("/checkpoint")
    async def checkpoint(request: Request, place: PlaceId, id: CheckpointId) -> m.ExplorerCheckpoint:
        """Return one checkpoint."""
        return await service.list(request, lambda _budget: views.checkpoint(service.explorer.entry(place, id)))


# -- tensors -------------------------------------------------------------------------------------------------------


def _add_tensors(router: APIRouter, service: _Service) -> None:
    explorer = service.explorer

    @router.get("/tree")
    async def children(
        request: Request, place: PlaceId, id: CheckpointId, under: Under = None, limit: Limit = 100, offset: Offset = 0
    ) -> Page[m.TreeNode]:
        """List the groups and tensors directly below a group."""

        def work(_budget: Budget) -> Page[m.TreeNode]:
            opened = explorer.open(place, id)
            nodes = explorer.children(opened, under)
            items = [views.node(opened, node) for node in nodes[offset : offset + limit]]
            return Page[m.TreeNode](**views.page_of(len(nodes), items, limit, offset))

        return await service.list(request, work)

    @router.get("/tensors")
    async def tensors(
        request: Request,
        place: PlaceId,
        id: CheckpointId,
        search: Search = "",
        under: Under = None,
        dtype: Annotated[str, Query(max_length=20)] = "",
        property: tree.Property | None = None,
        sort: tree.Sort = "order",
        descending: bool = False,
        against_place: AgainstPlace = None,
        against: MaybeAgainst = None,
        limit: Limit = 100,
        offset: Offset = 0,
    ) -> m.TensorPage:
        """Search tensors by name and property. Repeat the request until the scan is complete."""
        query = TensorQuery(search, under, dtype, property, sort, descending)

        def work(budget: Budget) -> m.TensorPage:
            opened = explorer.open(place, id)
            old = explorer.open(against_place or place, against) if against is not None else None
            found, scan = explorer.search(opened, query, old, budget)
            pair = explorer.pair(old, opened) if old is not None else None
            items = [views.tensor_of(opened, one, pair) for one in found[offset : offset + limit]]
            return m.TensorPage(**views.page_of(len(found), items, limit, offset), scan=views.scan_state(scan, budget))

        needs_data = property is not None or sort not in ("order", "name", "bytes")
        return await (service.read if needs_data else service.list)(request, work)

    @router.get("/statistics")
    async def statistics(request: Request, place: PlaceId, id: CheckpointId, name: Name) -> m.Tensor:
        """Return a tensor with its statistics; compute them if they are not stored."""

        def work(budget: Budget) -> m.Tensor:
            opened = explorer.open(place, id)
            tensor = opened.tensor(name)
            explorer.statistics(opened, tensor, budget)
            return views.tensor_of(opened, tensor)

        return await service.read(request, work)


# -- views of one tensor -------------------------------------------------------------------------------------------


def _add_views(router: APIRouter, service: _Service) -> None:
    explorer = service.explorer

    @router.get("/histogram")
    async def histogram(
        request: Request,
        place: PlaceId,
        id: CheckpointId,
        name: Name,
        bins: NumBins = 100,
        low: Edge = None,
        high: Edge = None,
    ) -> m.TensorHistogram:
        """Return the histogram of a tensor, of all its elements or of those from `low` to `high`."""

        def work(budget: Budget) -> m.TensorHistogram:
            opened = explorer.open(place, id)
            tensor = opened.tensor(name)
            found, source = explorer.histogram(opened, tensor, budget, num_bins=bins, low=low, high=high)
            return m.TensorHistogram(
                name=name,
                edges=list(found.edges),
                counts=list(found.counts),
                num_below=found.num_below,
                num_above=found.num_above,
                num_nan=found.num_nan,
                num_inf=found.num_inf,
                num_elements=math.prod(tensor.shape),
                range_from=source,
                read_bytes=budget.read_bytes,
            )

        return await service.read(request, work)

    @router.get("/heatmap")
    async def heat_map(
        request: Request,
        place: PlaceId,
        id: CheckpointId,
        name: Name,
        rows: Annotated[int, Query(ge=1, le=MAX_CELLS)] = 128,
        columns: Annotated[int, Query(ge=1, le=MAX_CELLS)] = 128,
    ) -> m.TensorHeatMap:
        """Return the means of blocks of a tensor: its first dimension by all others."""

        def work(budget: Budget) -> m.TensorHeatMap:
            opened = explorer.open(place, id)
            found = explorer.heat_map(opened, opened.tensor(name), budget, max_rows=rows, max_columns=columns)
            means = [[views.or_none(mean) for mean in row] for row in found.means().tolist()]
            finite = [mean for row in means for mean in row if mean is not None]
            return m.TensorHeatMap(
                name=name,
                num_rows=found.num_rows,
                num_columns=found.num_columns,
                row_edges=found.row_edges.tolist(),
                column_edges=found.column_edges.tolist(),
                means=means,
                num_not_finite=found.num_not_finite.tolist(),
                min=min(finite, default=None),
                max=max(finite, default=None),
                read_bytes=budget.read_bytes,
            )

        return await service.read(request, work)

    @router.get("/rows")
    async def rows(
        request: Request,
        place: PlaceId,
        id: CheckpointId,
        name: Name,
        points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = 256,
    ) -> m.TensorRows:
        """Return the norms of the rows of a tensor, and the rows that are dead or not finite."""

        def work(budget: Budget) -> m.TensorRows:
            opened = explorer.open(place, id)
            found = explorer.rows(opened, opened.tensor(name), budget, max_points=points)
            return m.TensorRows(
                name=name,
                num_rows=found.num_rows,
                row_edges=list(found.row_edges),
                norm_min=[views.or_none(norm) for norm in found.norm_min],
                norm_mean=[views.or_none(norm) for norm in found.norm_mean],
                norm_max=[views.or_none(norm) for norm in found.norm_max],
                num_dead=found.num_dead,
                dead=list(found.dead),
                num_with_nan=found.num_with_nan,
                with_nan=list(found.with_nan),
                num_with_inf=found.num_with_inf,
                with_inf=list(found.with_inf),
                read_bytes=budget.read_bytes,
            )

        return await service.read(request, work)

    @router.get("/singular-values")
    async def singular_values(request: Request, place: PlaceId, id: CheckpointId, name: Name) -> m.SingularValues:
        """Return the singular values of a small matrix, largest first."""

        def work(budget: Budget) -> m.SingularValues:
            opened = explorer.open(place, id)
            tensor = opened.tensor(name)
            found = explorer.spectrum(opened, tensor, budget)
            num_rows, num_columns = tensor.shape[0] if len(tensor.shape) > 1 else 1, 0
            num_columns = math.prod(tensor.shape) // num_rows if num_rows else 0
            return m.SingularValues(
                name=name,
                num_rows=num_rows,
                num_columns=num_columns,
                values=[views.or_none(value) for value in found.values],
                condition=found.condition,
                stable_rank=found.stable_rank,
                effective_rank=found.effective_rank,
                read_bytes=budget.read_bytes,
            )

        return await service.read(request, work)

    @router.get("/values")
    async def values(
        request: Request, place: PlaceId, id: CheckpointId, name: Name, start: Numbers = None, shape: Numbers = None
    ) -> m.TensorValues:
        """Return the elements of a box of a tensor."""

        def work(budget: Budget) -> m.TensorValues:
            opened = explorer.open(place, id)
            tensor = opened.tensor(name)
            box, found = explorer.values(opened, tensor, budget, start=_index(start), shape=_index(shape))
            return m.TensorValues(
                name=name, start=list(box.start), shape=list(box.shape), values=found, read_bytes=budget.read_bytes
            )

        return await service.read(request, work)


def _add_follow(router: APIRouter, service: _Service) -> None:
    explorer = service.explorer

    @router.get("/follow")
    async def follow(
        request: Request, place: PlaceId, name: Name, limit: Limit = 100, offset: Offset = 0
    ) -> m.FollowedPage:
        """Return one tensor in all checkpoints of a place, oldest first."""

        def work(budget: Budget) -> m.FollowedPage:
            found, total, scan = explorer.follow(place, name, budget, offset=offset, limit=limit)
            items = [views.followed(one) for one in found]
            return m.FollowedPage(
                **views.page_of(total, items, limit, offset), name=name, scan=views.scan_state(scan, budget)
            )

        return await service.read(request, work)


def _index(text: str | None) -> list[int] | None:
    if text is None:
        return None
    return [int(part) for part in text.split(",")] if text else []


# -- two checkpoints -----------------------------------------------------------------------------------------------


def _add_comparisons(router: APIRouter, service: _Service) -> None:
    explorer = service.explorer

    @router.get("/compare")
    async def compare(
        request: Request,
        place: PlaceId,
        id: CheckpointId,
        against: Against,
        against_place: AgainstPlace = None,
        search: Search = "",
        include_same: bool = False,
        limit: Limit = 100,
        offset: Offset = 0,
    ) -> m.ComparedPage:
        """Rank the tensors that differ, the largest relative change first. Repeat until the scan is complete."""

        def work(budget: Budget) -> m.ComparedPage:
            old, new = service.sides(place, id, against_place, against)
            found, pair, scan = explorer.compare(old, new, budget, search=search, include_same=include_same)

            changed = [pair.change(name) for name in pair.comparison.changed]
            items = [views.compared(old, new, name, change) for name, change in found[offset : offset + limit]]

            return m.ComparedPage(
                **views.page_of(len(found), items, limit, offset),
                old=m.CheckpointRef(place=old.place, id=old.contents.id),
                new=m.CheckpointRef(place=new.place, id=new.contents.id),
                num_same=pair.comparison.num_same + sum(change.state == "same" for change in changed),
                num_changed=sum(change.state == "changed" for change in changed),
                num_added=len(pair.comparison.added),
                num_removed=len(pair.comparison.removed),
                num_reshaped=len(pair.comparison.reshaped),
                same_structure=pair.comparison.same_structure,
                scan=views.scan_state(scan, budget),
            )

        return await service.read(request, work)

    @router.get("/compare/histogram")
    async def compare_histograms(
        request: Request,
        place: PlaceId,
        id: CheckpointId,
        name: Name,
        against: Against,
        against_place: AgainstPlace = None,
        bins: NumBins = 100,
    ) -> m.ComparedHistogram:
        """Return the histograms of a tensor before and after, with the same bins."""

        def work(budget: Budget) -> m.ComparedHistogram:
            old, new = service.sides(place, id, against_place, against)
            before, after, change = explorer.compare_histograms(old, new, name, budget, num_bins=bins)
            return m.ComparedHistogram(
                name=name,
                edges=list(after.edges),
                old=views.side_histogram(before),
                new=views.side_histogram(after),
                change=views.change_of(change),
                read_bytes=budget.read_bytes,
            )

        return await service.read(request, work)


# -- verify, export ------------------------------------------------------------------------------------------------


def _add_commands(router: APIRouter, service: _Service) -> None:
    explorer = service.explorer

    @router.post("/verify", status_code=202, dependencies=[Depends(require_json)])
    async def verify(request: Request, body: m.VerifyRequest) -> m.VerifyTask:
        """Verify every byte of a checkpoint in the background."""

        def work(_budget: Budget) -> m.VerifyTask:
            contents = explorer.open(body.place, body.id).contents
            if not isinstance(contents, SavedCheckpoint):
                raise errors.InvalidArgument(
                    f"{contents.id} is a plain safetensors file, which has no hashes to verify", field="id"
                )
            return views.task_of(service.tasks.verify(body.place, contents))

        return await service.list(request, work)

    @router.get("/tasks")
    async def tasks() -> m.TaskList:
        """List the verifications."""
        return m.TaskList(items=[views.task_of(one) for one in service.tasks.all()])

    @router.get("/tasks/{task}")
    async def task(task: str) -> m.VerifyTask:
        """Return the progress of a verification."""
        return views.task_of(service.tasks.get(task))

    @router.delete("/tasks/{task}", dependencies=[Depends(require_json)])
    async def cancel(task: str) -> m.VerifyTask:
        """Cancel a verification."""
        return views.task_of(service.tasks.cancel(task))

    @router.get(
        "/export",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/octet-stream": {}}, "description": "A safetensors file."}},
    )
    async def export(
        request: Request,
        place: PlaceId,
        id: CheckpointId,
        only: Annotated[list[str] | None, Query(max_length=100, description="Patterns such as model.*")] = None,
        strip_prefix: Annotated[str, Query(max_length=1_000)] = "",
    ) -> StreamingResponse:
        """Download tensors as one safetensors file."""
        if service.export_room.locked():
            raise errors.TooManyReads(
                f"max_exports={service.config.max_exports} downloads run already; try again later"
            )
        watch = Watch()

        def work(_budget: Budget) -> tuple[int, Iterator[bytes | memoryview], str]:
            contents = explorer.open(place, id).contents
            if isinstance(contents, PlainFile):
                return (*_plain_stream(contents, only or (), strip_prefix), contents.id)
            size, chunks = exports.stream(
                contents.store, contents.manifest, only=only or (), strip_prefix=strip_prefix, watch=watch
            )
            return size, chunks, f"{contents.id}.safetensors"

        size, chunks, file_name = await service.list(request, work)
        headers = {
            "Content-Length": str(size),
            "Content-Disposition": f'attachment; filename="{_NOT_FILE_NAME.sub("-", file_name)[:200]}"',
            "X-Content-Type-Options": "nosniff",
        }
        return StreamingResponse(_sent(service, chunks, watch), media_type="application/octet-stream", headers=headers)


async def _sent(service: _Service, chunks: Iterator[bytes | memoryview], watch: Watch) -> Any:
    """Yield chunks, each read in a thread; damage ends the connection before the promised length."""
    try:
        async with service.export_room:
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                for start in range(0, len(chunk), READ_BYTES):
                    yield bytes(chunk[start : start + READ_BYTES])
    except errors.StrataError as error:
        log.warning("a download ends early: %s", error.message)
        raise
    finally:
        watch.cancel()


def _plain_stream(
    contents: PlainFile, only: Sequence[str], strip_prefix: str
) -> tuple[int, Iterator[bytes | memoryview]]:
    if only or strip_prefix:
        raise errors.InvalidArgument("a plain safetensors file is downloaded as it is; leave out only and strip_prefix")

    def chunks() -> Iterator[bytes | memoryview]:
        for start in range(0, contents.size_bytes, READ_BYTES):
            data = bytearray(min(READ_BYTES, contents.size_bytes - start))
            contents.store.read_into(contents.id, start, memoryview(data))
            yield bytes(data)

    return contents.size_bytes, chunks()
