"""A relay serves the workers of one node with the coordinator's service, over one session to the coordinator.

It uses the coordinator's own server code with a different backend. It answers heartbeats itself and forwards them
aggregated, combines the arrivals of a node at a barrier into one call, and forwards everything else unchanged. A relay
keeps no state that matters: if it dies, the coordinator sees a closed session, and after a restart it asks.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2

from strata.clock import SystemClock
from strata.coordinator import wire
from strata.coordinator.client._config import ClientConfig
from strata.coordinator.client._link import SessionLink
from strata.coordinator.config import Limits, SecurityConfig
from strata.coordinator.relay.folds import BarrierKey, Gathering, Pulses, arriving, barrier_key, combined
from strata.coordinator.serve.admission import AdmissionControl
from strata.coordinator.serve.listener import (
    GRACE_S,
    lock_socket,
    make_grpc_server,
    require_safe,
    serve_until_shutdown,
    start_frames,
    start_grpc_server,
)
from strata.coordinator.serve.service import METHODS
from strata.coordinator.serve.session import SessionHub
from strata.coordinator.state.job import (
    DEFAULT_JOB,
    CheckpointAnnounced,
    CommandQueued,
    GenerationChanged,
    WorkerEventReported,
)
from strata.errors import BarrierBroken, ConfigError, LimitExceeded, PermissionRefused, StrataError
from strata.transport.addresses import parse_address, parse_addresses
from strata.transport.credentials import ClientSecurity
from strata.transport.tokens import Guard, grants_from
from strata.v1 import calls_pb2 as pb
from strata.v1 import session_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

    from strata.clock import Clock
    from strata.coordinator.serve.backend import Done, Listener
    from strata.coordinator.serve.service import Method
    from strata.coordinator.serve.session_frames import FramesServer
    from strata.coordinator.state.job import Notice
    from strata.transport.sockets import SocketLock

log = logging.getLogger(__name__)

BARRIER_MARGIN_S = 5.0
"""The coordinator times out barriers itself; the relay waits this much longer for that answer."""
LONGEST_BARRIER_S = 86_400.0
FORGET_EVERY_S = 10.0
HEALTH_EVERY_S = 0.1
"""Seconds between two checks of the upstream connection."""
LOST_CONNECTION = "its relay lost the connection to it"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    upstream: str
    """The address of the coordinator or of another relay: HOST:PORT or unix:PATH; several (leader and standbys)
    separated by commas."""
    listen: str = "127.0.0.1:50052"
    """The address for workers: HOST:PORT or unix:PATH. Port 0 picks a free port."""
    frames: str = "auto"
    """The address for sessions without HTTP/2, as in a coordinator."""
    fold_s: float = 0.005
    """Seconds that an arrival at a barrier waits for other workers of this node."""
    max_unanswered: int = 65_536
    """Unanswered upstream calls; further calls are refused."""
    limits: Limits = field(default_factory=Limits)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    """The tokens and TLS of this relay's server."""
    client: ClientConfig = field(default_factory=ClientConfig)
    """The timeouts of the upstream connection."""

    def __post_init__(self) -> None:
        upstream = {str(address) for address in parse_addresses(self.upstream, field="upstream")}
        if str(parse_address(self.listen, field="listen")) in upstream:
            raise ConfigError(
                f"listen={self.listen!r} is also upstream, so the relay would call itself; choose another address",
                field="listen",
            )
        if not 0 <= self.fold_s <= 1:
            raise ConfigError(
                f"fold_s={self.fold_s} must be between 0 and 1 second; the default is 0.005", field="fold_s"
            )
        if self.max_unanswered < 1:
            raise ConfigError(f"max_unanswered={self.max_unanswered} must be at least 1", field="max_unanswered")
        if self.client.max_message_bytes < self.limits.max_message_bytes:
            raise ConfigError(
                f"client.max_message_bytes={self.client.max_message_bytes} is below limits.max_message_bytes="
                f"{self.limits.max_message_bytes}, so an accepted message could not be forwarded; raise it",
                field="client.max_message_bytes",
            )


class RelayBackend:
    """The backend of a relay: the upstream session."""

    def __init__(self, config: RelayConfig, security: ClientSecurity, clock: Clock) -> None:
        self.limits = config.limits
        self.listeners: list[Listener] = []
        self._config = config
        self._security = security
        self._clock = clock
        self._link: SessionLink | None = None
        self._pulses = Pulses()
        self._fold_timer: asyncio.TimerHandle | None = None
        self._folded_s = 0.0
        self._forgot_s = 0.0
        self._gatherings: dict[BarrierKey, Gathering] = {}
        self._gather_timers: dict[BarrierKey, asyncio.TimerHandle] = {}
        self._special: dict[str, Callable[[Any, Done], None]] = {
            "heartbeat": self._heartbeat,
            "register_worker": self._register_worker,
            "deregister_worker": self._deregister_worker,
            "wait_barrier": self._wait_barrier,
            "list_workers": self._list_workers,
            "report_suspicion": self._report_suspicion,
        }

    async def open(self) -> None:
        addresses = [str(a) for a in parse_addresses(self._config.upstream, field="upstream")]
        self._link = SessionLink(
            addresses, self._config.client, self._security, on_notice=self._notice, on_connect=self._connected
        )
        await self._link.open()

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_connected

    async def close(self) -> None:
        for timer in (*self._gather_timers.values(), self._fold_timer):
            if timer is not None:
                timer.cancel()
        self._gather_timers.clear()
        if self._link is not None:
            await self._link.close()

    # -- Backend ---------------------------------------------------------------------------------------------------

    def submit(self, method: Method, request: Any, done: Done) -> None:
        special = self._special.get(method.field)
        if special is not None:
            special(request, done)
        else:
            self._forward(method.field, request, done)

    def suspect(self, job_id: str, worker_id: str, fence: int) -> None:
        request = pb.ReportSuspicionRequest(
            job_id=job_id, worker_id=worker_id, incarnation=fence, reason=LOST_CONNECTION
        )
        self._report_suspicion(request, lambda answer: log.debug("%s of %s is suspect: %r", worker_id, job_id, answer))

    # -- forwarding ------------------------------------------------------------------------------------------------

    def _forward(self, field: str, request: Any, done: Done, *, timeout_s: float | None = None) -> None:
        """Forward a call; `done` receives the coordinator's answer, or the error if none arrives."""
        link = self._link
        assert link is not None, "the relay is not open"
        if field not in ("heartbeat", "wait_barrier"):
            self._send_pending_arrival(request)
        try:
            if link.num_unanswered >= self._config.max_unanswered:
                raise LimitExceeded(
                    f"max_unanswered={self._config.max_unanswered} calls of this relay wait for the coordinator; "
                    "check that it is running, and try again later"
                )
            answered = link.submit(field, request)
        except StrataError as error:
            done(error)
            return
        wait_s = timeout_s or self._config.client.call_timeout_s
        timer = asyncio.get_running_loop().call_later(wait_s, answered.cancel)

        def on_answer(answered: asyncio.Future[Message]) -> None:
            timer.cancel()
            if answered.cancelled():
                done(link.unavailable(wait_s))
                return
            error = answered.exception()
            if error is None:
                done(answered.result())
            elif isinstance(error, PermissionRefused):
                done(
                    PermissionRefused(
                        f"{error.message} (this concerns the relay's own token, which is checked in addition to yours)"
                    )
                )
            elif isinstance(error, StrataError):
                done(error)
            else:
                done(StrataError(f"the relay failed on this call ({error}); see its log"))

        answered.add_done_callback(on_answer)

    def _send_pending_arrival(self, request: Any) -> None:
        """Send the worker's pending barrier arrival first, so that the calls of one worker stay in order."""
        who = (getattr(request, "job_id", "") or DEFAULT_JOB, getattr(request, "worker_id", ""))
        for key in list(self._gather_timers):
            waiting = self._gatherings[key].waiting
            if key.job_id == who[0] and any(who[1] in arriving(arrival) for arrival, _ in waiting):
                self._send_arrivals(key)

    # -- workers ---------------------------------------------------------------------------------------------------

    def _register_worker(self, request: pb.RegisterWorkerRequest, done: Done) -> None:
        def on_answer(answer: Message | StrataError) -> None:
            if isinstance(answer, pb.RegisterWorkerResponse):
                self._pulses.registered(request, answer, self._clock.monotonic_s())
            done(answer)

        self._forward("register_worker", request, on_answer)

    def _deregister_worker(self, request: pb.DeregisterWorkerRequest, done: Done) -> None:
        # From now on the coordinator answers its heartbeats, and none may reach it after the deregistration.
        self._pulses.forget(request)
        self._forward("deregister_worker", request, done)

    def _report_suspicion(self, request: pb.ReportSuspicionRequest, done: Done) -> None:
        self._pulses.doubt(request.job_id or DEFAULT_JOB, request.worker_id, request.incarnation)
        self._forward("report_suspicion", request, done)

    def _list_workers(self, request: pb.ListWorkersRequest, done: Done) -> None:
        """Send pending heartbeats first, so that the caller sees everything reported before its call."""
        self._send_beats(self._pulses.take(request.job_id or DEFAULT_JOB, all_of_it=True))
        self._forward("list_workers", request, done)

    # -- heartbeats ------------------------------------------------------------------------------------------------

    def _heartbeat(self, request: pb.HeartbeatRequest, done: Done) -> None:
        answer = self._pulses.beat(request, self._clock.monotonic_s())
        if answer is None:
            self._forward_beat(self._pulses.newest(request), done)
            return
        if self._pulses.urgent(request):
            self._send_beats(self._pulses.take(request.job_id or DEFAULT_JOB, request.worker_id))
        self._schedule_fold()
        done(answer)

    def _forward_beat(self, request: pb.HeartbeatRequest, done: Done, *, folded: bool = False) -> None:
        sent_s = self._clock.monotonic_s()

        def on_answer(answer: Message | StrataError) -> None:
            if isinstance(answer, pb.HeartbeatResponse):
                self._pulses.confirmed(request, answer, sent_s=sent_s, folded=folded)
            elif isinstance(answer, StrataError):
                self._pulses.refused(request, None if _is_undecided(answer) else answer, folded=folded)
            done(answer)

        self._forward("heartbeat", request, on_answer)

    def _send_beats(self, beats: list[pb.HeartbeatRequest]) -> None:
        """Send the heartbeats, all in one frame because they are sent in one turn of the loop."""
        for beat in beats:
            self._forward_beat(beat, _ignore_answer, folded=True)

    def _schedule_fold(self) -> None:
        if self._fold_timer is None:
            wait_s = self._folded_s + self._pulses.fold_s - self._clock.monotonic_s()
            self._fold_timer = asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._fold)

    def _fold(self) -> None:
        self._fold_timer = None
        self._folded_s = self._clock.monotonic_s()
        self._send_beats(self._pulses.take())
        if self._folded_s - self._forgot_s > FORGET_EVERY_S:
            self._forgot_s = self._folded_s
            self._pulses.forget_silent(self._folded_s)
        if self._pulses.has_pending:  # heartbeats of workers whose last one is unanswered
            self._schedule_fold()

    # -- barriers --------------------------------------------------------------------------------------------------

    def _wait_barrier(self, request: pb.WaitBarrierRequest, done: Done) -> None:
        key = barrier_key(request)
        if key is None:
            self._forward_arrival(request, done)
            return
        gathering = self._gatherings.setdefault(key, Gathering())
        gathering.waiting.append((request, done))
        gathering.arrived |= arriving(request)
        if self._pulses.have_all_arrived(gathering.arrived, key.job_id, key.members):
            self._send_arrivals(key)
        elif key not in self._gather_timers:
            later = asyncio.get_running_loop().call_later(self._config.fold_s, self._send_arrivals, key)
            self._gather_timers[key] = later

    def _send_arrivals(self, key: BarrierKey) -> None:
        timer = self._gather_timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        gathering = self._gatherings[key]
        arrivals, gathering.waiting = gathering.waiting, []
        gathering.num_calls += 1

        def on_answer(answer: Message | StrataError) -> None:
            gathering.num_calls -= 1
            if not gathering.num_calls and not gathering.waiting and self._gatherings.get(key) is gathering:
                del self._gatherings[key]
            if len(arrivals) > 1 and isinstance(answer, StrataError) and not _is_for_all(answer):
                for request, done in arrivals:  # each caller needs its own error; none was counted as arrived
                    self._forward_arrival(request, done)
                return
            for _, done in arrivals:
                done(answer)

        self._forward_arrival(combined([request for request, _ in arrivals]), on_answer)

    def _forward_arrival(self, request: pb.WaitBarrierRequest, done: Done) -> None:
        asked_s = request.timeout_s if 0 < request.timeout_s < LONGEST_BARRIER_S else LONGEST_BARRIER_S
        self._forward("wait_barrier", request, done, timeout_s=asked_s + BARRIER_MARGIN_S)

    # -- from upstream ---------------------------------------------------------------------------------------------

    def _connected(self) -> None:
        self._pulses.renew(self._clock.monotonic_s())
        self._send_beats(self._pulses.take())

    def _notice(self, notice: session_pb2.Notice) -> None:
        found: Notice
        if notice.HasField("generation_changed"):
            changed = notice.generation_changed
            self._pulses.update_generation(changed.job_id, changed.generation, changed.num_workers)
            found = GenerationChanged(changed.job_id, changed.generation, changed.num_workers, changed.reason)
        elif notice.HasField("command_queued"):
            queued = notice.command_queued
            self._pulses.add_command(queued)
            command, previous_id = wire.decode_command(queued.command), queued.previous_command_id
            found = CommandQueued(queued.job_id, queued.worker_id, command, previous_id)
        elif notice.HasField("checkpoint_committed"):
            committed = notice.checkpoint_committed
            found = CheckpointAnnounced(committed.job_id, committed.checkpoint_id, committed.step)
        elif events := wire.decode_worker_events([notice.worker_event_reported.event]):
            reported = notice.worker_event_reported
            found = WorkerEventReported(reported.job_id, reported.worker_id, events[0])
        else:
            return
        for listener in self.listeners:
            listener([found])


def _ignore_answer(_answer: Message | StrataError) -> None:
    """Ignore the answer: the worker has been answered already."""


def _is_undecided(error: StrataError) -> bool:
    """Whether the call got no decision because no coordinator was reachable."""
    return wire.status_of(error) is grpc.StatusCode.UNAVAILABLE


def _is_for_all(error: StrataError) -> bool:
    """Whether the error applies to all combined arrivals: the barrier counted them, or no coordinator was reachable."""
    return isinstance(error, BarrierBroken) or _is_undecided(error)


@dataclass(frozen=True, slots=True)
class RelayAddresses:
    grpc: str
    upstream: str


class RelayServer:
    """Start it inside a running event loop; `stop` shuts down cleanly."""

    def __init__(
        self, config: RelayConfig, *, security: ClientSecurity | None = None, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._backend = RelayBackend(config, security or ClientSecurity(), self._clock)
        self._hub: SessionHub | None = None
        self._grpc: grpc.aio.Server | None = None
        self._lock: SocketLock | None = None
        self._frames: FramesServer | None = None
        self._health = health.aio.HealthServicer()
        self._health_task: asyncio.Task[None] | None = None

    async def start(self) -> RelayAddresses:
        config = self._config
        listen = parse_address(config.listen, field="listen")
        guard = Guard(grants_from(config.security.tokens))
        require_safe(listen, config.security, guard, field="listen")
        try:
            self._lock = lock_socket(listen)
            await self._backend.open()
            admission = AdmissionControl(guard, config.limits, self._clock)
            self._hub = SessionHub(self._backend, METHODS, admission)
            server = make_grpc_server(self._backend, self._hub, admission, self._health)
            await self._set_health(serving=True)
            address = await start_grpc_server(server, str(listen), config.security)
            self._grpc = server
            self._frames = await start_frames(self._hub, config.frames, address, config.limits, config.security, guard)
            self._health_task = asyncio.create_task(self._watch_health(), name="strata-relay-health")
        except BaseException:
            await self.stop()
            raise
        return RelayAddresses(address, config.upstream)

    async def _watch_health(self) -> None:
        """Report NOT_SERVING to load balancers while the coordinator is unreachable."""
        reported = True
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            serving = self._backend.is_connected
            if serving is not reported:
                log.warning("%s", "reconnected to the coordinator" if serving else "lost the coordinator; reconnecting")
                await self._set_health(serving=serving)
                reported = serving

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", wire.SERVICE):
            await self._health.set(name, status)

    async def stop(self) -> None:
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.gather(self._health_task, return_exceptions=True)
            self._health_task = None
        if self._hub is not None:
            self._hub.leave()
        if self._frames is not None:
            await self._frames.stop()
        if self._grpc is not None:
            await self._health.enter_graceful_shutdown()
            await self._grpc.stop(GRACE_S)
            self._grpc = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        await self._backend.close()


def run(config: RelayConfig, *, security: ClientSecurity, announce: Callable[[RelayAddresses], None]) -> None:
    """Serve until SIGTERM or SIGINT."""
    asyncio.run(serve_until_shutdown(lambda: RelayServer(config, security=security), announce))
