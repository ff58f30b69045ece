"""The agent that leads a run: it carries out the supervisor's actions and reports to it what happened.

It is one asyncio program. Exits, signals, requests and ticks become events for the supervisor, whose actions the agent
carries out; besides, it watches the workers and updates the display.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from strata import tracing
from strata.clock import Clock, SystemClock
from strata.coordinator.state import server_figures
from strata.errors import ConfigError, StrataError
from strata.identity import Identity, process_name
from strata.launch.actions import AddServers, AskToStop, Finish, MoveRows, Note, StartAttempt, StartWorker
from strata.launch.environment import METRICS, NEEDED_WORLD_SIZE, NOT_SAVING, WorkerSpec
from strata.launch.nodes.base import RoomChanged
from strata.launch.protocol import DumpStacks, KillWorkers
from strata.launch.record.directory import RunStatus
from strata.launch.record.timeline import RunEvent
from strata.launch.record.trace import RecoveryTraces
from strata.launch.record.view import RunView, WorkerView, describe_checkpoint
from strata.launch.supervisor import Phase, Supervisor
from strata.launch.watchdog import StepWatch
from strata.printing import counted

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from typing import Any

    from strata.coordinator.client import AsyncCoordinatorClient
    from strata.coordinator.state.events import CheckpointRecord
    from strata.coordinator.state.membership import WorkerEvent
    from strata.coordinator.state.server_figures import ServerFigures
    from strata.coordinator.state.views import WorkerInfo
    from strata.launch.actions import Action
    from strata.launch.nodes.base import Nodes
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.display import Display
    from strata.launch.spec import RunSpec

TICK_S = 0.05
"""Interval between two ticks while the supervisor waits for a point in time."""
SHOW_S = 0.25
"""Interval between two updates of the display."""
LOOK_S = 0.25
"""Interval between two looks at the workers where the coordinator sends no notices about them."""
LOOK_WATCHING_S = 1.0
"""The same where it does: steps and metrics change only with a worker's heartbeat."""
LEAST_LOOK_S = 0.05
"""Shortest interval between two looks, however many notices come."""
MAX_DIGITS = 6
"""Most digits of a world size in a checkpoint's metadata."""
UNSHOWN = ("chosen",)
"""Events that are in the timeline only: what follows within moments says the same."""
ASK_AGAIN_S = 60.0
"""Interval between two requests to move rows, if the first had no result."""
CHECKPOINT_TIMEOUT_S = 2.0
"""Longest wait for a coordinator to return the last checkpoint; it may be down."""
STATES = {
    Phase.NEW: "starting",
    Phase.RUNNING: "running",
    Phase.ENDING: "running",
    Phase.WAITING: "running",
    Phase.SHORT: "running",
    Phase.STOPPING: "stopping",
    Phase.OVER: "running",  # until its reason is written
}


@dataclass(slots=True)
class _Observed:
    """What the agent knows about the workers of this attempt."""

    watch: StepWatch
    workers: dict[int, WorkerInfo] = field(default_factory=dict)
    noted: set[tuple[int, int, str, float]] = field(default_factory=set)
    """Worker events that are in the timeline: rank, incarnation at the coordinator if it was restarted alone, kind."""
    restarted: dict[int, int] = field(default_factory=dict)
    """Ranks that were restarted alone, each with the incarnation of the process that failed; 0 if that is unknown."""
    num_lost: dict[tuple[int, int], int] = field(default_factory=dict)
    """Lost updates of each process that are in the timeline, by rank and incarnation at the coordinator."""
    asked_to_move_s: float = float("-inf")
    """When the workers were last asked to agree on a step after which rows move."""


class Agent:
    """Lead a run until its end. `finish` is None until then."""

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        nodes: Nodes,
        client: AsyncCoordinatorClient,
        display: Display,
        *,
        coordinator: str,
        control: str = "",
        page: str = "",
        last_attempt: int = -1,
        last_step: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.supervisor = Supervisor(
            spec.workers,
            spec.max_restarts,
            spec.grace_s,
            spec.min_wait_s,
            room=nodes.room,
            num_servers=spec.scaled_servers or spec.num_servers,
            scaled_servers=spec.scaled_servers,
            attempt=last_attempt,
            step=last_step,
        )
        self.finish: Finish | None = None
        self._spec = spec
        self._directory = directory
        self._nodes = nodes
        self._client = client
        self._display = display
        self._coordinator = coordinator
        self._clock = clock or SystemClock()
        self._observed = _Observed(StepWatch(spec.step_timeout_s))
        self._status = RunStatus.of_this_process(now_s=self._clock.wall_s())
        self._status = msgspec.structs.replace(self._status, control=control, coordinator=coordinator, page=page)
        self._began_s = self._clock.monotonic_s()
        self._last_event = ""
        self._checkpoint: CheckpointRecord | None = None
        self._stop_reason = ""
        self._is_over = asyncio.Event()
        self._has_acted = asyncio.Event()
        """The supervisor has decided something, and may wait for a point in time since."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._traces = RecoveryTraces(spec.name) if tracing.is_on() else None

    async def run(self) -> Finish:
        """Run until the supervisor ends the run. All workers have exited by then."""
        tasks = [
            asyncio.create_task(each) for each in (self._receive(), self._tick(), self._observe(), self._refresh())
        ]
        try:
            await self._fetch_checkpoint()
            await self._act(self.supervisor.begin(now_s=self._now_s()))
            over = asyncio.create_task(self._is_over.wait())
            done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
            for each in done - {over}:
                each.result()  # raises: these tasks only end with an error
            assert self.finish is not None
            return self.finish
        finally:
            for each in [*tasks, *self._tasks]:
                each.cancel()
            await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
            await self._nodes.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        self._spawn(self._act(self.supervisor.stop(reason, now_s=self._now_s(), is_now=is_now)))

    def scale(self, workers: int | None, servers: int | None = None) -> None:
        """
        Raises:
            ConfigError: A number is outside the allowed range, a loader's state is per rank, or the number of servers
                of this run cannot change while it trains.
        """
        if servers is not None:
            self._check_servers(servers)
        self._spawn(self._act(self.supervisor.scale(workers, servers, now_s=self._now_s())))

    def dump_stacks(self, rank: int) -> None:
        """
        Raises:
            ConfigError: There is no such worker now.
        """
        running = self.supervisor.running
        if rank not in running:
            now = f"ranks {', '.join(map(str, sorted(running)))} run" if running else "no worker runs"
            raise ConfigError(f"rank={rank} does not run now, {now}; choose one that runs", field="rank")
        self._spawn(self._act([DumpStacks(self.supervisor.attempt, (rank,))]))

    def _check_servers(self, servers: int) -> None:
        problem = ""
        if self._spec.engine == "ray":
            problem = "on Ray"
        elif self._spec.num_nodes > 1:
            problem = "on several machines"
        elif any(worker.metrics.get(METRICS.has_copies) for worker in self._observed.workers.values()):
            problem = "with replicas=1"
        if problem:
            raise ConfigError(
                f"the number of parameter servers of a run {problem} cannot change while it trains; stop it with "
                f"`strata stop {self._spec.name}`, and resume it with servers={servers} in its strategy",
                field="servers",
            )

    # -- events ----------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            event = await self._nodes.next_event()
            if len(self.supervisor.running) == 1 and self._needs_checkpoint():
                await self._fetch_checkpoint()
            self.supervisor.room = self._nodes.room  # a lost node reports the exits of its workers first
            if isinstance(event, RoomChanged):
                actions = self.supervisor.room_changed(
                    event.room, event.why, now_s=self._now_s(), must_move=self._nodes.must_move
                )
            else:
                self._directory.keep_log_end(self.supervisor.attempt, event.rank, event.log_end)
                if event.step is not None:
                    self.supervisor.advanced(event.step)
                actions = self.supervisor.exited(event, now_s=self._now_s())
            await self._act(actions)

    def _needs_checkpoint(self) -> bool:
        """Whether the next decision depends on the last checkpoint, which we may not know yet.

        A checkpoint saved for a stop decides which world size can resume. Failures of a program count as alike only if
        they follow the same checkpoint.
        """
        cause = self.supervisor.cause
        return self.supervisor.phase is Phase.STOPPING or (cause is not None and cause.code > 0)

    async def _tick(self) -> None:
        """Tick only while the supervisor waits for a point in time: the agent shares its cores with the workers."""
        while True:
            self._has_acted.clear()
            if self.supervisor.is_waiting:
                await asyncio.sleep(TICK_S)
                await self._act(self.supervisor.tick(now_s=self._now_s()))
            else:
                await self._has_acted.wait()

    async def _observe(self) -> None:
        """Fetch workers and checkpoint whenever the coordinator sends a notice about the job, and at an interval. A
        coordinator that cannot be reached changes nothing.
        """
        interval_s = LOOK_S
        while True:
            await asyncio.sleep(LEAST_LOOK_S)
            await self._client.wait_notice(self._spec.name, interval_s - LEAST_LOOK_S)
            interval_s = LOOK_S
            with contextlib.suppress(StrataError):
                found = await self._client.list_workers(job_id=self._spec.name, watch=True)
                interval_s = LOOK_WATCHING_S if found.is_watching else LOOK_S
                if self._traces is not None:
                    self._traces.changed(found.generation, self._clock.wall_s())
                await self._update([each for each in found.workers if self._is_of_this_attempt(each)])
            await self._fetch_checkpoint()
            self._write_status()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(SHOW_S)
            self._show()

    async def _fetch_checkpoint(self) -> None:
        """Fetch the last checkpoint: where a failure sets the run back to, and which world size can resume from it."""
        with contextlib.suppress(StrataError, TimeoutError):
            async with asyncio.timeout(CHECKPOINT_TIMEOUT_S):
                found = await self._client.latest_checkpoint(job_id=self._spec.name)
            self._checkpoint = found
            if found is not None:
                self.supervisor.saved(found.checkpoint.step)
            self._set_only()

    def _set_only(self) -> None:
        """Set the only world size that can resume, if any. Running workers override the last checkpoint: they save the
        next one.
        """
        needed = self._checkpoint.metadata.get(NEEDED_WORLD_SIZE, "") if self._checkpoint is not None else ""
        is_number = needed.isdecimal() and len(needed) <= MAX_DIGITS
        self.supervisor.only = int(needed) + self.supervisor.num_servers if is_number else 0
        if any(worker.metrics.get(METRICS.per_rank) for worker in self._observed.workers.values()):
            self.supervisor.only = self.supervisor.world_size

    def _is_of_this_attempt(self, worker: WorkerInfo) -> bool:
        return worker.attempt == self.supervisor.attempt

    async def _update(self, workers: Sequence[WorkerInfo]) -> None:
        by_rank = {_rank_of(worker): worker for worker in workers}
        if self.supervisor.resizing is None:  # a server that was removed may still be about to leave
            by_rank = {rank: worker for rank, worker in by_rank.items() if rank < self.supervisor.world_size}
        self._observed.workers |= by_rank
        self._set_only()
        if workers:
            self.supervisor.joined()
        for rank, worker in by_rank.items():
            server = server_figures.number_of(worker.metrics)
            if server is not None and self.supervisor.resizing is None:  # the servers are the last ranks
                self.supervisor.num_servers = self.supervisor.world_size - (rank - server)
            if worker.state == "TRAINING":
                self.supervisor.advanced(worker.step, rank)
        self._note_worker_events()
        self._note_lost_updates(by_rank)
        await self._follow_move()
        hung = self._observed.watch.look(by_rank, self.supervisor.running, now_s=self._now_s())
        if hung is not None:
            await self._act(self.supervisor.hung(hung.ranks, hung.silent_s))

    async def _follow_move(self) -> None:
        """Ask the workers to move rows once all new servers are ready; notice when all ranks use the new servers."""
        supervisor, workers = self.supervisor, self._observed.workers
        resizing = supervisor.resizing
        if resizing is None or supervisor.phase is not Phase.RUNNING:
            return
        layouts = {rank: worker.metrics.get(METRICS.layout, 0.0) for rank, worker in workers.items()}
        if all(layouts.get(rank) == supervisor.layout for rank in range(supervisor.world_size)):
            for rank in [rank for rank in workers if rank >= supervisor.world_size]:
                del workers[rank]
            self._nodes.resized(supervisor.world_size, supervisor.num_servers, supervisor.layout)
            self._keep_servers()
            self._observed.asked_to_move_s = float("-inf")
            num_rows = sum(int(each.metrics.get(METRICS.moved_rows, 0)) for each in workers.values())
            await self._act(supervisor.resized(num_rows))
            return
        new = range(resizing.first_new, supervisor.world_size)
        is_ready = all(layouts.get(rank, 0.0) > supervisor.layout - 1 for rank in new)
        if is_ready and self._now_s() - self._observed.asked_to_move_s >= ASK_AGAIN_S:
            await self._ask_to_move(supervisor.num_servers, supervisor.layout)

    def _keep_servers(self) -> None:
        """Let `strata resume` start with the number of servers that there are now."""
        supervisor = self.supervisor
        spec = msgspec.structs.replace(
            self._directory.spec,
            workers=supervisor.size,
            num_servers=supervisor.num_servers,
            scaled_servers=supervisor.num_servers,
        )
        try:
            self._directory.write_next_spec(spec)
        except ConfigError as error:
            self._note("scaling", f"a resumed run will start with the old number of parameter servers: {error}")

    async def _ask_to_move(self, num_servers: int, layout: int) -> None:
        """Let the ranks that train and serve now agree on a step after which rows move."""
        supervisor = self.supervisor
        assert supervisor.resizing is not None
        num_workers = supervisor.world_size - num_servers
        present = num_workers + supervisor.resizing.num_before
        self._observed.asked_to_move_s = self._now_s()
        try:
            await self._client.send_command(
                "REBALANCE",
                job_id=self._spec.name,
                worker_ids=[Identity(rank=rank, world_size=present).worker_id for rank in range(present)],
                reason=f"scaling to {counted(num_servers, 'parameter server')}",
                args={"attempt": str(supervisor.attempt), "servers": str(num_servers), "layout": str(layout)},
            )
        except StrataError:  # a rank is gone, and the attempt ends; or the coordinator restarts
            self._observed.asked_to_move_s = float("-inf")

    def _note_worker_events(self) -> None:
        """Add the events of rank 0 and of workers that were restarted alone to the timeline, at the times of their own
        clocks.
        """
        observed = self._observed
        for rank in sorted({0, *observed.restarted} & observed.workers.keys()):
            worker = observed.workers[rank]
            incarnation = worker.incarnation if rank in observed.restarted else 0
            if incarnation and incarnation == observed.restarted[rank]:
                continue  # the process that failed
            for event in sorted(worker.events.values(), key=lambda event: event.at_s):
                # A worker chooses again if the ranks cannot load its first choice.
                key = (rank, incarnation, event.kind, event.at_s if event.kind == "CHOSEN" else 0.0)
                if key not in observed.noted:
                    observed.noted.add(key)
                    text = self._event_in_words(event, worker, rank)
                    self._note(event.kind.lower(), text, rank=rank, step=event.step, at_s=event.at_s)

    def _event_in_words(self, event: WorkerEvent, worker: WorkerInfo, rank: int) -> str:
        whose = "training"
        if rank in self._observed.restarted:
            whose = process_name(rank, world_size=self.supervisor.world_size, num_servers=self.supervisor.num_servers)
        if event.kind == "FIRST_STEP":
            return f"{whose} {'continues' if 'RESTORED' in worker.events else 'begins'}"
        return f"{f'{whose}: ' if rank in self._observed.restarted else ''}checkpoint of step {event.step:,}"

    def _note_lost_updates(self, workers: Mapping[int, WorkerInfo]) -> None:
        """Add the updates that restarted parameter servers have lost to the timeline."""
        for rank, worker in workers.items():
            number = int(worker.metrics.get(METRICS.lost_updates, 0))
            before = self._observed.num_lost.get((rank, worker.incarnation), 0) if number else 0
            if number > before:
                self._observed.num_lost[rank, worker.incarnation] = number
                name = process_name(
                    rank, world_size=self.supervisor.world_size, num_servers=self.supervisor.num_servers
                )
                text = f"{name} restarted from the last checkpoint without {counted(number - before, 'update')}"
                self._note("lost", text, rank=rank)

    # -- actions ---------------------------------------------------------------------------------------------------

    async def _act(self, actions: Sequence[Action]) -> None:
        """Carry out what the supervisor has decided. Every decision comes here, even if it is to do nothing."""
        self._has_acted.set()
        attempt = self.supervisor.attempt
        for action in actions:
            if attempt != self.supervisor.attempt and isinstance(
                action, (StartWorker, AddServers, MoveRows, AskToStop, KillWorkers, DumpStacks)
            ):
                continue  # dumping stacks takes a while: this was meant for workers that have ended since
            match action:
                case StartAttempt(attempt, world_size):
                    await self._start(attempt, world_size)
                case StartWorker(of_attempt, rank, incarnation):
                    before = self._observed.workers.get(rank)
                    self._observed.restarted[rank] = 0 if before is None else before.incarnation
                    await self._nodes.restart(of_attempt, rank, incarnation)
                case AddServers(of_attempt, ranks, num_before, layout):
                    self._observed.watch.expect(ranks, now_s=self._now_s())
                    await self._nodes.add_servers(of_attempt, ranks, num_before=num_before, layout=layout)
                case MoveRows(num_servers, layout):
                    await self._ask_to_move(num_servers, layout)
                case AskToStop(reason):
                    self._spawn(self._ask_to_stop(reason))
                case KillWorkers(of_attempt, ranks):
                    self._nodes.kill(of_attempt, ranks)
                case DumpStacks(_, ranks):
                    await self._nodes.dump_stacks(ranks)
                case Note(what, text, of_attempt, rank):
                    self._note(what, text, attempt=of_attempt, rank=rank)
                case Finish():
                    self.finish = action
                    await self._fetch_checkpoint()  # it may be newer than the last look
                    self._note("finished", f"{action.outcome}: {action.reason}")
                    self._show()
                    self._is_over.set()

    async def _start(self, attempt: int, world_size: int) -> None:
        self._observed = _Observed(StepWatch(self._spec.step_timeout_s, self._spec.is_start_watched))
        if self.supervisor.scaled_servers:
            self._keep_servers()
        await self._remove_leftovers(world_size)
        await self._nodes.launch(
            WorkerSpec(
                identity=Identity(
                    run=self._spec.name, attempt=attempt, world_size=world_size, local_world_size=world_size
                ),
                coordinator=self._coordinator,
                checkpoints=self._spec.checkpoints,
                max_restarts=self._spec.max_restarts,
                num_servers=self.supervisor.scaled_servers,
            ),
            num_servers=self.supervisor.scaled_servers or self._spec.num_servers,
        )
        if self.supervisor.phase is Phase.STOPPING and self.supervisor.attempt == attempt:
            await self._ask_to_stop(self._stop_reason)  # requested before any worker could receive it

    async def _remove_leftovers(self, world_size: int) -> None:
        """Remove members of the last attempt whose ranks the next one does not have. Its ranks start together only once
        these are gone, which would otherwise take a lease.
        """
        with contextlib.suppress(StrataError):
            found = await self._client.list_workers(job_id=self._spec.name)
            for each in found.workers:
                if _rank_of(each) >= world_size:
                    replaced = await self._client.register_worker(each.worker_id, job_id=self._spec.name, takeover=True)
                    await replaced.deregister("its attempt is over")

    async def _ask_to_stop(self, reason: str) -> None:
        """Send STOP to workers with a context, which then agree on a step. Send SIGTERM to scripts without one, and as
        long as some workers have not joined: no worker has made a step that could be saved.
        """
        self._stop_reason = reason
        attempt, ranks = self.supervisor.attempt, sorted(self.supervisor.running)
        have_context = set(self._observed.workers)
        with contextlib.suppress(StrataError):
            found = await self._client.list_workers(job_id=self._spec.name)
            if self.supervisor.attempt != attempt:
                return
            joined = {_rank_of(each): each.worker_id for each in found.workers if self._is_of_this_attempt(each)}
            have_context |= joined.keys()
            if joined and joined.keys() >= set(ranks):
                await self._client.send_command(
                    "STOP",
                    job_id=self._spec.name,
                    worker_ids=list(joined.values()),
                    reason=reason,
                    args={"attempt": str(attempt)},
                )
                return
        if self.supervisor.attempt != attempt:
            return
        self.supervisor.signalled(set(ranks) - have_context)
        for rank in ranks:
            self._nodes.send_signal(rank, signal.SIGTERM)

    # -- timeline, status and display ------------------------------------------------------------------------------

    def _note(
        self,
        what: str,
        text: str,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        step: int | None = None,
        at_s: float | None = None,
    ) -> None:
        wall_s, monotonic_s = self._clock.wall_s(), self._now_s()
        at_s = wall_s if at_s is None else at_s
        event = RunEvent(
            at_s=at_s,
            monotonic_s=monotonic_s + at_s - wall_s,
            what=what,
            text=text,
            attempt=self.supervisor.attempt if attempt is None else attempt,
            rank=rank,
            step=step,
        )
        self._directory.note(event)
        for each in () if self._traces is None else self._traces.add(event):
            tracing.export(each)
        if what not in UNSHOWN:
            self._last_event = text
            self._display.print_event(event)
        self._write_status()

    def _write_status(self) -> None:
        supervisor = self.supervisor
        changed = {
            "state": self.finish.outcome if self.finish is not None else STATES[supervisor.phase],
            "attempt": max(supervisor.attempt, 0),
            "world_size": supervisor.world_size,
            "num_servers": supervisor.num_servers,
            "servers": self._server_figures(),
            "only_workers": supervisor.only,
            "num_restarts": supervisor.num_restarts,
            "step": supervisor.step,
            "checkpoint": self._checkpoint.checkpoint.path if self._checkpoint is not None else "",
            "reason": self.finish.reason if self.finish is not None else "",
            "exit_code": self.finish.exit_code if self.finish is not None else None,
        }
        made = msgspec.structs.replace(self._status, **changed)
        if made != self._status:
            self._status = msgspec.structs.replace(made, updated_at_s=self._clock.wall_s())
            self._directory.write_status(self._status)

    def _server_figures(self) -> ServerFigures | None:
        """Return what the servers report, together; between attempts and at the end, the last values without rates."""
        each = (server_figures.figures_of(worker.metrics) for worker in self._observed.workers.values())
        found = server_figures.total(one for one in each if one is not None)
        if found is not None and self.finish is None:
            return found
        last = found or self._status.servers
        return None if last is None else last.without_rates()

    def _show(self) -> None:
        self._write_status()
        supervisor = self.supervisor
        self._display.show(
            RunView(
                name=self._spec.name,
                phase=supervisor.phase.value if self.finish is None else self.finish.outcome,
                attempt=max(supervisor.attempt, 0),
                world_size=supervisor.world_size,
                num_servers=supervisor.num_servers,
                num_restarts=supervisor.num_restarts,
                max_restarts=self._spec.max_restarts,
                elapsed_s=self._now_s() - self._began_s,
                workers=[WorkerView.of(rank, worker) for rank, worker in sorted(self._observed.workers.items())],
                checkpoint=self._describe_checkpoint(),
                last_event=self._last_event,
                directory=str(self._directory.path),
            )
        )

    def _describe_checkpoint(self) -> str:
        last = self._checkpoint
        return describe_checkpoint(
            (last.checkpoint.step, self._clock.wall_s() - last.committed_at_s) if last is not None else None,
            [
                (int(each.metrics.get(METRICS.saving_step, NOT_SAVING)), each.metrics.get(METRICS.saving_fraction, 0.0))
                for each in self._observed.workers.values()
            ],
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now_s(self) -> float:
        return self._clock.monotonic_s()


def _rank_of(worker: WorkerInfo) -> int:
    return worker.rank if worker.launch_rank is None else worker.launch_rank
