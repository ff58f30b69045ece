"""The session stream: calls in frames from the client, answers and notices in frames to it.

A gRPC message costs the server far more than the work in it, so a frame carries all calls that the client has to make,
and an answer frame all answers since the last one. Calls run in order of arrival; an answer that waits for the disk or
for a barrier does not delay the others.

When a stream ends, the workers that used it become suspect.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from strata._version import __version__
from strata.coordinator import wire
from strata.coordinator.serve.admission import (
    SMALL_BYTES,
    answer_too_large,
    check_repeated,
    check_wire,
    receivable_bytes,
)
from strata.coordinator.serve.metrics import Metrics
from strata.coordinator.state import limits
from strata.coordinator.state.job import (
    DEFAULT_JOB,
    CheckpointAnnounced,
    CommandQueued,
    GenerationChanged,
    WorkerEventReported,
)
from strata.errors import CoordinatorUnavailable, InvalidArgument, LimitExceeded, PermissionRefused, StrataError
from strata.transport.tokens import refused
from strata.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from google.protobuf.message import Message

    from strata.coordinator.serve.admission import AdmissionControl, Bucket
    from strata.coordinator.serve.backend import Backend
    from strata.coordinator.serve.service import Method
    from strata.coordinator.state.job import Notice
    from strata.transport.tokens import Role

log = logging.getLogger(__name__)

Answer = tuple[int, str, "Message", int]
"""Request id, field name in `Response`, the message for that field, and its size in bytes."""
WorkerKey = tuple[str, str]
"""Job id and worker id."""
NO_HELLO = "the first frame of a session carries hello.session_id"
MAX_SESSION_ID = 128
MAX_WATCHED_JOBS = 100
HELLO_WITHIN_S = 10.0
"""Seconds in which a new connection must send its first frame."""
NO_FRAME = "a frame is not a strata.v1.ClientFrame"
SLICE_S = 0.005
"""Time that the calls of one frame may take per turn of the event loop."""
LOOK_EVERY = 16
"""Calls between two readings of the clock."""
_DONE = object()
_LEVELS = 3
"""Levels of a frame that contain elements: its calls, the fields of each, and the shards or members in these."""


class Unread:
    """Counts the bytes of answers that clients have not read yet, over all sessions.

    Beyond the limit, the session with the most unread bytes is dropped.
    """

    def __init__(self, most_bytes: int, links: Callable[[], Iterable[Link]]) -> None:
        """Create the counter; `links` returns all open links."""
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._links = links

    def shed(self) -> None:
        link = max(self._links(), key=lambda link: link.num_unread_bytes)
        link.drop(f"limits.max_unread_bytes={self.most_bytes} are unread")


class Link:
    """One open session: its workers, and the answers and notices to send."""

    def __init__(
        self,
        session_id: str,
        *,
        role: Role,
        bucket: Bucket,
        unread: Unread,
        max_backlog: int,
        max_frame_bytes: int,
        max_request_bytes: int,
        on_news: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        """Open the session; `on_news` is called when there is something to send or the session must end, `on_idle` when
        it is no longer busy.
        """
        self.session_id = session_id
        self.role = role
        self.bucket = bucket
        self.workers: dict[WorkerKey, int] = {}
        """(job, worker) → fence of the workers that registered or sent a heartbeat through this session."""
        self.watched_jobs: set[str] = set()
        self.given_up: tuple[grpc.StatusCode, str] | None = None
        """Why the server ends the session."""
        self.max_answer_bytes = max_frame_bytes - wire.FRAME_MARGIN_BYTES
        self.max_request_bytes = max_request_bytes
        """The size limit of one frame from the client."""
        self.is_busy = False
        """A large frame waits in the queue or is being processed. Until it is done, no other frame is processed."""
        self.large = b""
        """That frame, while it waits."""
        self.on_idle = on_idle
        self.num_unread_bytes = 0
        """Bytes of unread answers, here or in the buffer of the connection."""
        self._unread = unread
        self._answers: list[Answer] = []
        self._num_answer_bytes = 0
        self._notices: list[pb.Notice] = []
        self._num_unanswered = 0
        self._ended = False
        self._max_backlog = max_backlog
        self._max_frame_bytes = max_frame_bytes
        self._on_news = on_news

    @property
    def num_unanswered(self) -> int:
        return self._num_unanswered

    def add_unanswered(self, num: int) -> None:
        self._num_unanswered += num

    def answer(self, request_id: int, result: str, message: Message, num_bytes: int) -> None:
        self._num_unanswered -= 1
        if self.given_up:
            return
        self._answers.append((request_id, result, message, num_bytes))
        self._num_answer_bytes += num_bytes
        self.num_unread_bytes += num_bytes  # inlined `count_unread`: this runs for every call
        unread = self._unread
        unread.num_bytes += num_bytes
        if unread.num_bytes > unread.most_bytes:
            unread.shed()
        self._wake()

    def count_unread(self, num_bytes: int) -> None:
        """Add `num_bytes` (possibly negative) to the unread answers. After the session was given up, they no longer
        count.
        """
        if self.given_up:
            return
        unread = self._unread
        unread.num_bytes += num_bytes
        self.num_unread_bytes += num_bytes
        if unread.num_bytes > unread.most_bytes:
            unread.shed()

    def notify(self, notice: pb.Notice) -> None:
        if self.given_up:
            return
        self._notices.append(notice)
        self._wake()

    def end(self) -> None:
        """The client makes no more calls; those in progress are still answered."""
        self._ended = True
        self._on_news()

    def give_up(self, code: grpc.StatusCode, why: str) -> None:
        self.given_up = self.given_up or (code, why)
        self.large = b""
        self._clear()
        self._on_news()

    def drop(self, why: str) -> None:
        """End the session because its client does not read its answers."""
        log.warning("dropping session %.8s…: the client does not read its answers", self.session_id)
        self.give_up(grpc.StatusCode.RESOURCE_EXHAUSTED, f"too many unread answers: {why}")

    def _clear(self) -> None:
        self._answers, self._notices, self._num_answer_bytes = [], [], 0
        self._unread.num_bytes -= self.num_unread_bytes
        self.num_unread_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent."""
        if self.given_up:
            return True
        return self._ended and not self._num_unanswered and not self._answers and not self._notices

    def _wake(self) -> None:
        num = len(self._answers) + len(self._notices)
        if num == 1:  # else there was news before, and it has not been taken yet
            self._on_news()
        elif num > self._max_backlog:
            self.drop("read them, or send fewer calls at once")

    def take_frame(self) -> pb.ServerFrame | None:
        """Return all pending answers, or as many as fit into one frame; None without any."""
        answers, notices = self._answers, self._notices
        if self.given_up or not (answers or notices):
            return None
        num_answers, num_bytes = len(answers), self._num_answer_bytes
        if not wire.fits(num_answers, num_bytes, self._max_frame_bytes):
            num_answers, num_bytes = wire.num_sizes_fitting((size for *_, size in answers), self._max_frame_bytes)
        num_notices = wire.num_fitting(notices, self._max_frame_bytes) if num_answers == len(answers) else 0
        frame = _frame(answers[:num_answers], notices[:num_notices])
        if num_notices and num_answers and frame.ByteSize() > self._max_frame_bytes:
            num_notices = 0
            frame = _frame(answers[:num_answers], ())
        self._answers, self._notices = answers[num_answers:], notices[num_notices:]
        self._num_answer_bytes -= num_bytes
        self.count_unread(-num_bytes)
        return frame


def _frame(answers: Iterable[Answer], notices: Iterable[pb.Notice]) -> pb.ServerFrame:
    """Build a frame; each answer is copied once, into its place."""
    frame = pb.ServerFrame(notices=notices)
    add = frame.responses.add
    for request_id, result, message, _ in answers:
        response = add()  # assigned field by field: protobuf takes 0.3 µs more for keyword arguments
        response.id = request_id
        getattr(response, result).CopyFrom(message)
    return frame


class SessionHub:
    """All open sessions."""

    def __init__(
        self, backend: Backend, methods: Iterable[Method], admission: AdmissionControl, metrics: Metrics | None = None
    ) -> None:
        self._backend = backend
        self._admission = admission
        self.metrics = metrics or Metrics()
        self._methods = {method.field: method for method in methods}
        self._heavy = {method.field for method in self._methods.values() if method.is_heavy}
        self._stats = {field: self.metrics.stats_of(method.name) for field, method in self._methods.items()}
        self._following: dict[str, Callable[[Link, Any, Any], None]] = {
            "register_worker": self._registered,
            "heartbeat": self._beaten,
            "deregister_worker": self._deregistered,
            "list_workers": self._listed,
        }
        """Calls that show which stream a worker uses."""
        self._links: dict[str, Link] = {}
        self._unread = Unread(backend.limits.max_unread_bytes, self._links.values)
        self._links_by_worker: dict[WorkerKey, Link] = {}
        """The stream that each worker used last."""
        self.refusal: Callable[[], StrataError | None] = lambda: None
        """Why no session may start at present: a standby redirects its callers at once."""
        self._instance = secrets.token_hex(16)
        self.frames = ""
        """The address of the frames server, which clients receive in `welcome`."""
        backend.listeners.append(self._broadcast)

    @property
    def num_sessions(self) -> int:
        return len(self._links)

    def dropped(self, link: Link) -> None:
        """Record that the server ended a session."""
        self.metrics.num_sessions_dropped += link.given_up is not None and (
            link.given_up[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        )

    def leave(self) -> None:
        """End all sessions because the coordinator shuts down. Their clients connect to the next one."""
        self.refusal = lambda: CoordinatorUnavailable("the coordinator is shutting down; try the next address")
        for link in self._links.values():
            link.give_up(grpc.StatusCode.UNAVAILABLE, "the coordinator is shutting down")

    # -- for the transports ----------------------------------------------------------------------------------------

    def begin(
        self,
        hello: pb.Hello,
        role: Role,
        *,
        carrier_bytes: int,
        on_news: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> Link:
        """Start a session after `hello`; its connection accepts frames of up to `carrier_bytes`.

        Raises:
            StrataError: No session may start at present.
        """
        if refusal := self.refusal():
            raise refusal
        if not hello.session_id:
            raise InvalidArgument(NO_HELLO, field="session_id")
        limits_ = self._backend.limits
        if len(hello.session_id) > MAX_SESSION_ID:
            raise LimitExceeded(f"session_id is longer than {MAX_SESSION_ID} characters", field="session_id")
        before = self._links.get(hello.session_id)
        if before is None:
            limits.check_room(len(self._links), limits_.max_sessions, "sessions", "max_sessions", field="session_id")
        elif role < before.role:
            raise PermissionRefused("another caller has this session_id; choose another one", field="session_id")
        link = Link(
            hello.session_id,
            role=role,
            bucket=before.bucket if before else self._admission.bucket(),
            unread=self._unread,
            max_backlog=limits_.max_session_backlog,
            max_frame_bytes=limits_.max_message_bytes,
            max_request_bytes=receivable_bytes(role, carrier_bytes),
            on_news=on_news,
            on_idle=on_idle,
        )
        self._open(link)
        return link

    def welcome(self, link: Link) -> pb.ServerFrame:
        return pb.ServerFrame(
            welcome=pb.Welcome(
                server=f"strata {__version__}",
                max_message_bytes=link.max_request_bytes,
                frames=self.frames,
                instance=self._instance,
            )
        )

    def decode(self, frame: bytes) -> pb.ClientFrame | None:
        """Decode a frame, or return None if it is invalid."""
        self.metrics.frames_in.add(len(frame))
        try:
            return pb.ClientFrame.FromString(frame)
        except DecodeError:
            return None

    def encode(self, frame: pb.ServerFrame) -> bytes:
        data = frame.SerializeToString()
        self.metrics.frames_out.add(len(data))
        return data

    def role_of(self, token: str) -> Role:
        return self._admission.role_of(token)

    def receive(self, link: Link, message: bytes) -> None:
        """Process a frame. A small one runs now; a large one makes the link busy."""
        assert not link.is_busy, "frames of a session are processed one after the other"
        if len(message) > SMALL_BYTES:
            link.large = message
            self._occupy(link, self._process_large(link))
        elif (frame := self.decode(message)) is None:
            link.give_up(grpc.StatusCode.INVALID_ARGUMENT, NO_FRAME)
        else:
            self.run_calls(link, frame.requests)

    def rest(self, link: Link, since_s: float) -> None:
        """Make a link that has been processing frames since `since_s` busy for one turn, if that was long enough."""
        if not link.is_busy and self.metrics.now_s() > since_s + SLICE_S:
            self._occupy(link, iter(()))

    def run_calls(self, link: Link, requests: Sequence[pb.Request]) -> None:
        """Run the calls of a small frame, as many as one turn allows."""
        came_s = self.metrics.now_s()
        if len(requests) == 1:  # most frames: they need no slices
            request = requests[0]
            field = request.WhichOneof("call")
            if field not in self._heavy:
                num_paced = self._admit(link, 1, came_s)
                if num_paced:
                    self._call(link, request, field, came_s, is_large=False)
                elif num_paced == 0:
                    self._refuse(link, request, self._admission.too_fast(), came_s)
                return
        work = self._run_slices(link, requests, came_s)
        if next(work, _DONE) is not _DONE:
            self._occupy(link, work)

    def _occupy(self, link: Link, work: Iterator[None]) -> None:
        def until_idle() -> Iterator[None]:
            try:
                yield from work
            finally:
                link.is_busy = False
                link.on_idle()

        link.is_busy = True
        self._admission.fair_queue.add(until_idle(), link.bucket.account)

    def _process_large(self, link: Link) -> Iterator[None]:
        message, link.large = link.large, b""
        if link.given_up:
            return
        try:
            check_wire(message, levels=_LEVELS, limits=self._backend.limits)
        except StrataError as error:
            link.give_up(wire.status_of(error), error.message)
            return
        frame = self.decode(message)
        if frame is None:
            link.give_up(grpc.StatusCode.INVALID_ARGUMENT, NO_FRAME)
            return
        yield
        yield from self._run_slices(link, frame.requests, self.metrics.now_s(), is_large=True)

    def _run_slices(
        self, link: Link, requests: Sequence[pb.Request], came_s: float, *, is_large: bool = False
    ) -> Iterator[None]:
        """Run the calls of a frame in slices. Rate and backlog are checked once for all of them."""
        num_paced = self._admit(link, len(requests), came_s)
        if num_paced is None:
            return
        now_s, heavy, until_s = self.metrics.now_s, self._heavy, came_s + SLICE_S
        for number, request in enumerate(requests):
            field = request.WhichOneof("call")
            if field in heavy or (number and not number % LOOK_EVERY and now_s() > until_s):
                yield
                until_s = now_s() + SLICE_S
            if link.given_up:
                return
            if number < num_paced:
                self._call(link, request, field, came_s, is_large=is_large)
            else:
                self._refuse(link, request, self._admission.too_fast(), came_s)

    def _admit(self, link: Link, num: int, came_s: float) -> int | None:
        """Return how many calls of a frame the rate allows (an empty frame counts as one), or None if the session was
        ended.
        """
        num_allowed = self._backend.limits.max_session_backlog
        if link.num_unanswered + num > num_allowed:
            why = f"more than limits.max_session_backlog={num_allowed} unanswered calls; wait for answers first"
            link.give_up(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            return None
        num_paced = link.bucket.take(max(num, 1), came_s)
        if not num_paced and not num:
            link.give_up(grpc.StatusCode.RESOURCE_EXHAUSTED, self._admission.too_fast().message)
            return None
        link.add_unanswered(num)
        return num_paced

    def _refuse(self, link: Link, request: pb.Request, error: StrataError, came_s: float) -> None:
        stats = self._stats.get(request.WhichOneof("call") or "")
        if stats is not None:
            stats.refused(wire.status_of(error).name, self.metrics.now_s() - came_s)
        message = wire.encode_error(error)
        link.answer(request.id, "error", message, message.ByteSize())

    def _call(self, link: Link, request: pb.Request, field: str | None, came_s: float, *, is_large: bool) -> None:
        if field is None:
            unknown = InvalidArgument("this coordinator does not know the call; it may be older than the client")
            self._refuse(link, request, unknown, came_s)
            return
        method = self._methods[field]
        body, request_id = getattr(request, field), request.id
        needed = method.role if method.role_for is None else method.role_for(body)
        if link.role < needed:
            self._refuse(link, request, refused(link.role, needed, method.name), came_s)
            return
        if is_large:
            try:
                check_repeated(method.repeated, body, self._backend.limits)
            except LimitExceeded as error:
                self._refuse(link, request, error.with_traceback(None), came_s)
                return
        follow, stats, now_s = self._following.get(field), self._stats[field], self.metrics.now_s

        def done(answer: Message | StrataError) -> None:
            if isinstance(answer, StrataError):
                self._refuse(link, request, answer, came_s)
                return
            num_bytes = answer.ByteSize()
            if num_bytes > link.max_answer_bytes:
                self._refuse(link, request, answer_too_large(num_bytes, self._backend.limits), came_s)
                return
            stats.answered(now_s() - came_s)
            if follow is not None:
                follow(link, body, answer)
            link.answer(request_id, field, answer, num_bytes)

        if field == "report_suspicion" and self._uses_another_stream(link, body):
            done(method.response())
        else:
            self._backend.submit(method, body, done)

    # -- the streams of workers ------------------------------------------------------------------------------------

    def _registered(self, link: Link, body: Any, answer: Any) -> None:
        self._bind_worker(link, (body.job_id or DEFAULT_JOB, body.worker_id), answer.incarnation)

    def _beaten(self, link: Link, body: Any, _answer: Any) -> None:
        key, fence = (body.job_id or DEFAULT_JOB, body.worker_id), body.incarnation
        if fence and (link.workers.get(key) != fence or self._links_by_worker.get(key) is not link):
            self._bind_worker(link, key, fence)

    def _deregistered(self, link: Link, body: Any, _answer: Any) -> None:
        key = (body.job_id or DEFAULT_JOB, body.worker_id)
        link.workers.pop(key, None)
        if self._links_by_worker.get(key) is link:
            del self._links_by_worker[key]

    def _listed(self, link: Link, body: Any, answer: Any) -> None:
        job_id = body.job_id or DEFAULT_JOB
        if body.watch and (job_id in link.watched_jobs or len(link.watched_jobs) < MAX_WATCHED_JOBS):
            link.watched_jobs.add(job_id)
            answer.is_watching = True

    def _uses_another_stream(self, link: Link, body: Any) -> bool:
        """Whether the worker has used another stream since, which voids the suspicion of a relay."""
        return self._links_by_worker.get((body.job_id or DEFAULT_JOB, body.worker_id), link) is not link

    def _open(self, link: Link) -> None:
        """Register the link. A client that reconnects with its session id keeps its workers."""
        self.metrics.num_sessions_opened += 1
        before = self._links.get(link.session_id)
        self._links[link.session_id] = link
        if before is None:
            return
        for key, fence in before.workers.items():
            self._bind_worker(link, key, fence)
        before.workers.clear()
        link.watched_jobs |= before.watched_jobs
        before.give_up(grpc.StatusCode.ABORTED, "the client has reconnected on another connection")

    def _bind_worker(self, link: Link, key: WorkerKey, fence: int) -> None:
        link.workers[key] = fence
        self._links_by_worker[key] = link

    def closed(self, link: Link) -> None:
        """Handle a lost connection: its workers become suspect."""
        link.give_up(grpc.StatusCode.CANCELLED, "the connection was lost")
        if self._links.get(link.session_id) is link:
            del self._links[link.session_id]
        for key, fence in link.workers.items():
            if self._links_by_worker.get(key) is link:  # else the worker has used another stream since
                del self._links_by_worker[key]
                self._backend.suspect(*key, fence)

    def _broadcast(self, notices: list[Notice]) -> None:
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
                links = {link for (job_id, _), link in self._links_by_worker.items() if job_id == notice.job_id}
                for link in links | self._watchers(notice.job_id):
                    link.notify(message)
            elif isinstance(notice, CommandQueued):
                message = pb.Notice(
                    command_queued=pb.CommandQueued(
                        job_id=notice.job_id,
                        worker_id=notice.worker_id,
                        command=wire.encode_command(notice.command),
                        previous_command_id=notice.previous_id,
                    )
                )
                link_of_worker = self._links_by_worker.get((notice.job_id, notice.worker_id))
                if link_of_worker is not None:
                    link_of_worker.notify(message)
            elif isinstance(notice, CheckpointAnnounced):
                committed = pb.CheckpointCommitted(
                    job_id=notice.job_id, checkpoint_id=notice.checkpoint_id, step=notice.step
                )
                self._notify_watchers(notice.job_id, pb.Notice(checkpoint_committed=committed))
            elif isinstance(notice, WorkerEventReported):
                reported = pb.WorkerEventReported(
                    job_id=notice.job_id, worker_id=notice.worker_id, event=wire.encode_worker_event(notice.event)
                )
                self._notify_watchers(notice.job_id, pb.Notice(worker_event_reported=reported))

    def _notify_watchers(self, job_id: str, message: pb.Notice) -> None:
        for link in self._watchers(job_id):
            link.notify(message)

    def _watchers(self, job_id: str) -> set[Link]:
        return {link for link in self._links.values() if job_id in link.watched_jobs}
