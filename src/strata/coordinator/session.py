"""The session stream: the same calls in frames, and notices the other way.

A gRPC message costs the server far more than the work in it, so a frame carries as many calls as the client had to
make, and an answer frame as many answers as have gathered since the last one went out. Calls run in the order they
came; an answer that must wait for the disk or for a barrier does not hold up the others.

A stream that ends casts suspicion on the workers that spoke through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from strata._version import __version__
from strata.coordinator import limits, wire
from strata.coordinator.job import DEFAULT_JOB, CommandQueued, GenerationChanged
from strata.coordinator.metrics import Metrics
from strata.coordinator.service import abort
from strata.errors import InvalidArgument, StrataError
from strata.transport.tokens import require
from strata.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from strata.coordinator.backend import Backend
    from strata.coordinator.door import Bucket, Door
    from strata.coordinator.job import Notice
    from strata.coordinator.service import Method
    from strata.transport.tokens import Role

log = logging.getLogger(__name__)

WorkerKey = tuple[str, str]
"""Job and worker."""
_SPEAKING = {"register_worker", "heartbeat", "deregister_worker"}
"""Calls that tell through which stream a worker is heard."""


class _Malformed:
    """A frame that cannot be decoded."""


class Link:
    """One open stream: what it says of workers, and what is to be sent down it."""

    def __init__(self, session_id: str, *, role: Role, bucket: Bucket, max_backlog: int, max_frame_bytes: int) -> None:
        self.session_id = session_id
        self.role = role
        self.bucket = bucket
        self.workers: dict[WorkerKey, int] = {}
        """(job, worker) → fence, of those that registered or beat through it."""
        self.given_up: tuple[grpc.StatusCode, str] | None = None
        """Why it is ended from our side."""
        self._backlog: list[pb.Response | pb.Notice] = []
        self._num_unanswered = 0
        self._ended = False
        self._max_backlog = max_backlog
        self._max_frame_bytes = max_frame_bytes
        self._news = asyncio.Event()

    def asked(self) -> None:
        self._num_unanswered += 1

    def answer(self, response: pb.Response) -> None:
        self._num_unanswered -= 1
        self.send(response)

    def end(self) -> None:
        """The client has no more calls; those it made are still answered."""
        self._ended = True
        self._news.set()

    def give_up(self, code: grpc.StatusCode, why: str) -> None:
        self.given_up = (code, why)
        self._backlog.clear()
        self._news.set()

    def send(self, message: pb.Response | pb.Notice) -> None:
        if self.given_up:
            return
        self._backlog.append(message)
        if len(self._backlog) > self._max_backlog:
            log.warning("session %s does not read its answers; dropped", self.session_id)
            why = "too many unread answers; read them, or send fewer calls at once"
            self.give_up(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._news.set()

    async def next_frame(self) -> pb.ServerFrame | None:
        """Everything that has gathered, or as much of it as goes into one frame; None when nothing more is to come."""
        while not self._backlog:
            if self.given_up or (self._ended and not self._num_unanswered):
                return None
            self._news.clear()
            await self._news.wait()
        num = wire.num_fitting(self._backlog, self._max_frame_bytes)
        now, self._backlog = self._backlog[:num], self._backlog[num:]
        return pb.ServerFrame(
            responses=[m for m in now if isinstance(m, pb.Response)],
            notices=[m for m in now if isinstance(m, pb.Notice)],
        )


class SessionHub:
    """All open sessions."""

    def __init__(self, backend: Backend, methods: Iterable[Method], door: Door, metrics: Metrics | None = None) -> None:
        self._backend = backend
        self._door = door
        self.metrics = metrics or Metrics()
        self._methods = {method.field: method for method in methods}
        self._stats = {field: self.metrics.stats_of(method.name) for field, method in self._methods.items()}
        self._links: dict[str, Link] = {}
        self._speakers: dict[WorkerKey, Link] = {}
        """Through which stream a worker was last heard."""
        self.refusal: Callable[[], StrataError | None] = lambda: None
        """Why no session may begin at present: a standby sends its callers elsewhere at once."""
        backend.listeners.append(self._spread)

    @property
    def num_sessions(self) -> int:
        return len(self._links)

    def leave(self) -> None:
        """Ends all sessions: the coordinator goes. Their clients look for the next one."""
        for link in self._links.values():
            link.give_up(grpc.StatusCode.UNAVAILABLE, "the coordinator is leaving")

    def handler(self) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.stream_stream_rpc_method_handler(
            self._serve,
            request_deserializer=self._decode,
            response_serializer=self._encode,
        )

    def _decode(self, frame: bytes) -> pb.ClientFrame | _Malformed:
        self.metrics.frames_in.add(len(frame))
        try:
            return pb.ClientFrame.FromString(frame)
        except DecodeError:
            # Raised here, it would end the call under the writer's feet: gRPC then sometimes loses the status.
            return _Malformed()

    def _encode(self, frame: pb.ServerFrame) -> bytes:
        data = frame.SerializeToString()
        self.metrics.frames_out.add(len(data))
        return data

    async def _serve(self, _requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            role = self._door.role(context)
            if refusal := self.refusal():
                raise refusal
            limits.check_room(
                len(self._links), self._backend.limits.max_sessions, "sessions", "max_sessions", field="session_id"
            )
        except StrataError as error:
            await abort(context, error)
        first = await context.read()
        if not isinstance(first, pb.ClientFrame) or not first.HasField("hello") or not first.hello.session_id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the first frame of a session carries hello.session_id"
            )
        link = Link(
            first.hello.session_id,
            role=role,
            bucket=self._door.bucket(),
            max_backlog=self._backend.limits.max_session_backlog,
            max_frame_bytes=self._backend.limits.max_message_bytes,
        )
        self._open(link)
        writer = asyncio.create_task(self._write(link, context))
        try:
            frame: Any = first
            while isinstance(frame, pb.ClientFrame):
                came_s = self.metrics.now_s()
                for request in frame.requests:
                    self._call(link, request, came_s)
                frame = await context.read()
            if isinstance(frame, _Malformed):
                link.give_up(grpc.StatusCode.INVALID_ARGUMENT, "a frame is not a strata.v1.ClientFrame")
            link.end()
            # Not cancelled: a status cannot be sent while a message is on its way.
            await writer
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
            self._closed(link)

    async def _write(self, link: Link, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.write(pb.ServerFrame(welcome=pb.Welcome(server=f"strata {__version__}")))
        while (frame := await link.next_frame()) is not None:
            await context.write(frame)
        if link.given_up:
            self.metrics.num_sessions_dropped += link.given_up[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(*link.given_up)

    def _call(self, link: Link, request: pb.Request, came_s: float) -> None:
        link.asked()
        field: str | None = request.WhichOneof("call")
        if field is None:
            unknown = InvalidArgument("this call is not known to this coordinator; it may be older than the client")
            link.answer(pb.Response(id=request.id, error=wire.encode_error(unknown)))
            return
        method = self._methods[field]
        body = getattr(request, field)
        stats, now_s = self._stats[field], self.metrics.now_s

        def done(answer: Any) -> None:
            if isinstance(answer, StrataError):
                stats.refused(wire.status_of(answer).name, now_s() - came_s)
                link.answer(pb.Response(id=request.id, error=wire.encode_error(answer)))
                return
            stats.answered(now_s() - came_s)
            key = (body.job_id or DEFAULT_JOB, body.worker_id) if field in _SPEAKING else None
            if field == "register_worker" and key:
                self._speaks(link, key, answer.incarnation)
            elif field == "heartbeat" and key and body.incarnation:
                self._speaks(link, key, body.incarnation)
            elif field == "deregister_worker" and key:
                link.workers.pop(key, None)
                if self._speakers.get(key) is link:
                    del self._speakers[key]
            result: dict[str, Any] = {field: answer}
            link.answer(pb.Response(id=request.id, **result))

        try:
            require(link.role, method.role, method.name)
            self._door.pace(link.bucket, came_s)
        except StrataError as error:
            done(error)
            return
        if field == "report_suspicion":
            speaker = self._speakers.get((body.job_id or DEFAULT_JOB, body.worker_id), link)
            if speaker is not link:
                done(method.response())  # it has been heard through another stream since
                return
        self._backend.submit(method, body, done)

    def _open(self, link: Link) -> None:
        """A client that comes back under its session's name speaks for the same workers as before."""
        self.metrics.num_sessions_opened += 1
        before = self._links.get(link.session_id)
        self._links[link.session_id] = link
        for key, fence in before.workers.items() if before else ():
            self._speaks(link, key, fence)

    def _speaks(self, link: Link, key: WorkerKey, fence: int) -> None:
        link.workers[key] = fence
        self._speakers[key] = link

    def _closed(self, link: Link) -> None:
        if self._links.get(link.session_id) is link:
            del self._links[link.session_id]
        for key, fence in link.workers.items():
            if self._speakers.get(key) is link:  # else it has been heard through another stream since
                del self._speakers[key]
                self._backend.suspect(*key, fence)

    def _spread(self, notices: list[Notice]) -> None:
        for notice in notices:
            if isinstance(notice, GenerationChanged):
                message = pb.Notice(
                    generation_changed=pb.GenerationChanged(
                        job_id=notice.job_id,
                        generation=notice.generation,
                        num_workers=notice.num_workers,
                        reason=notice.reason,
                    )
                )
                for link in {link for (job_id, _), link in self._speakers.items() if job_id == notice.job_id}:
                    link.send(message)
            elif isinstance(notice, CommandQueued):
                message = pb.Notice(
                    command_queued=pb.CommandQueued(
                        job_id=notice.job_id,
                        worker_id=notice.worker_id,
                        command=wire.encode_command(notice.command),
                    )
                )
                speaker = self._speakers.get((notice.job_id, notice.worker_id))
                if speaker is not None:
                    speaker.send(message)
