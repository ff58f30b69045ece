"""The agent that leads a run: it has the supervisor's orders carried out, and tells it what happened.

One asyncio program. Everything that can happen arrives in one place each (an exit, a signal, a request, a tick), is put
to the supervisor, and what it orders is done; the rest is looking and showing.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from strata.clock import Clock, SystemClock
from strata.errors import StrataError
from strata.identity import Identity
from strata.launch.environment import METRICS, NEEDED_WORLD_SIZE, NOT_SAVING, WorkerSpec
from strata.launch.nodes.base import RoomChanged
from strata.launch.record.directory import RunStatus
from strata.launch.record.timeline import RunEvent
from strata.launch.record.view import RunView, WorkerView, checkpoint_in_words
from strata.launch.supervisor import (
    AskToStop,
    DumpStacks,
    End,
    Exited,
    Finish,
    Phase,
    Start,
    Supervisor,
    Tell,
)
from strata.launch.watchdog import StepWatch

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from strata.coordinator.client import AsyncCoordinatorClient
    from strata.coordinator.state.events import CheckpointRecord
    from strata.coordinator.state.views import WorkerInfo
    from strata.launch.nodes.base import Nodes
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.view import Shower
    from strata.launch.spec import RunSpec
    from strata.launch.supervisor import Order

TICK_S = 0.05
SHOW_S = 0.25
"""Interval between two updates of the display."""
LOOK_S = 0.25
"""Interval between two looks at the workers where the coordinator sends no notices about them."""
LOOK_WATCHING_S = 1.0
"""The same where it does: steps and metrics change only with a worker's heartbeat."""
LEAST_LOOK_S = 0.05
"""Shortest interval between two looks, however many notices come."""
MAX_DIGITS = 6
"""Of a number of workers, as a checkpoint's metadata has it."""
LEARN_TIMEOUT_S = 2.0
"""For the last checkpoint, of a coordinator that may be away: nothing waits longer for it."""
STATES = {
    Phase.NEW: "starting",
    Phase.RUNNING: "running",
    Phase.ENDING: "running",
    Phase.WAITING: "running",
    Phase.SHORT: "running",
    Phase.STOPPING: "stopping",
    Phase.OVER: "running",  # until what ended it is written, too
}


@dataclass(slots=True)
class _Seen:
    """What is known of the workers of this attempt."""

    watch: StepWatch
    workers: dict[int, WorkerInfo] = field(default_factory=dict)
    noted: set[str] = field(default_factory=set)
    """Kinds of worker events that are in the timeline."""


class Agent:
    """Runs a run until its end. `finish` is None before."""

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        nodes: Nodes,
        client: AsyncCoordinatorClient,
        shower: Shower,
        *,
        coordinator: str,
        control: str = "",
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
            attempt=last_attempt,
            step=last_step,
        )
        self.finish: Finish | None = None
        self._spec = spec
        self._directory = directory
        self._nodes = nodes
        self._client = client
        self._shower = shower
        self._coordinator = coordinator
        self._clock = clock or SystemClock()
        self._seen = _Seen(StepWatch(spec.step_timeout_s))
        self._status = RunStatus.of_this_process(now_s=self._clock.wall_s())
        self._status = msgspec.structs.replace(self._status, control=control, coordinator=coordinator)
        self._began_s = self._clock.monotonic_s()
        self._last_event = ""
        self._checkpoint: CheckpointRecord | None = None
        self._stop_reason = ""
        self._is_over = asyncio.Event()
        self._doing: set[asyncio.Task[None]] = set()

    async def run(self) -> Finish:
        """Until the supervisor says that it is over. Nobody of the workers is left then."""
        tasks = [
            asyncio.create_task(each) for each in (self._hear(), self._tick(), self._look(), self._refresh_display())
        ]
        try:
            await self._learn_checkpoint()
            await self._obey(self.supervisor.begin(now_s=self._now_s()))
            over = asyncio.create_task(self._is_over.wait())
            done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
            for each in done - {over}:
                each.result()  # it raises: these end only by an error
            assert self.finish is not None
            return self.finish
        finally:
            for each in [*tasks, *self._doing]:
                each.cancel()
            await asyncio.gather(*tasks, *self._doing, return_exceptions=True)
            await self._nodes.close()

    # -- what is asked from outside --------------------------------------------------------------------------------

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        self._do(self._obey(self.supervisor.stop(reason, now_s=self._now_s(), is_now=is_now)))

    def scale(self, workers: int) -> None:
        """
        Raises:
            ConfigError: Outside the allowed range, or a loader's state cannot be divided.
        """
        self._do(self._obey(self.supervisor.scale(workers, now_s=self._now_s())))

    # -- what happens ----------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        while True:
            event = await self._nodes.next_event()
            if self.supervisor.phase is Phase.STOPPING and len(self.supervisor.running) == 1:
                await self._learn_checkpoint()  # the one that they have just saved says how many can go on
            self.supervisor.room = self._nodes.room  # of a node that is lost, first the workers' ends are told
            if isinstance(event, RoomChanged):
                orders = self.supervisor.room_changed(
                    event.room, event.why, now_s=self._now_s(), must_move=self._nodes.must_move
                )
            else:
                self._directory.keep_log_end(self.supervisor.attempt, event.rank, event.log_end)
                if event.step is not None:
                    self.supervisor.advanced(event.step)
                orders = self.supervisor.exited(Exited(event.rank, event.code, event.last_words), now_s=self._now_s())
            await self._obey(orders)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._obey(self.supervisor.tick(now_s=self._now_s()))

    async def _look(self) -> None:
        """Look at the workers and the last checkpoint whenever the coordinator sends a notice about the job, and from
        time to time. A coordinator that cannot be reached changes nothing.
        """
        interval_s = LOOK_S
        while True:
            await asyncio.sleep(LEAST_LOOK_S)
            await self._client.wait_notice(self._spec.name, interval_s - LEAST_LOOK_S)
            interval_s = LOOK_S
            with contextlib.suppress(StrataError):
                found = await self._client.list_workers(job_id=self._spec.name, watch=True)
                interval_s = LOOK_WATCHING_S if found.is_watching else LOOK_S
                await self._see([each for each in found.workers if self._is_of_this_attempt(each)])
            await self._learn_checkpoint()
            self._write_status()

    async def _refresh_display(self) -> None:
        while True:
            await asyncio.sleep(SHOW_S)
            self._show()

    async def _learn_checkpoint(self) -> None:
        """The last one: how far a failure would set the run back, and how many workers can go on from it."""
        with contextlib.suppress(StrataError, TimeoutError):
            async with asyncio.timeout(LEARN_TIMEOUT_S):
                found = await self._client.latest_checkpoint(job_id=self._spec.name)
            self._checkpoint = found
            if found is not None:
                self.supervisor.saved(found.checkpoint.step)
            self._set_only()

    def _set_only(self) -> None:
        """Workers that run count more than the last checkpoint: the next one is theirs."""
        needed = self._checkpoint.metadata.get(NEEDED_WORLD_SIZE, "") if self._checkpoint is not None else ""
        self.supervisor.only = int(needed) if needed.isdecimal() and len(needed) <= MAX_DIGITS else 0
        if any(worker.metrics.get(METRICS.per_rank) for worker in self._seen.workers.values()):
            self.supervisor.only = self.supervisor.world_size

    def _is_of_this_attempt(self, worker: WorkerInfo) -> bool:
        return worker.attempt == self.supervisor.attempt

    async def _see(self, workers: Sequence[WorkerInfo]) -> None:
        by_rank = {_rank_of(worker): worker for worker in workers}
        self._seen.workers |= by_rank
        self._set_only()
        if workers:
            self.supervisor.joined()
        for worker in workers:
            if worker.state == "TRAINING":
                self.supervisor.advanced(worker.step)
        self._note_moments()
        hung = self._seen.watch.look(by_rank, self.supervisor.running, now_s=self._now_s())
        if hung is not None:
            await self._obey(self.supervisor.hung(hung.ranks, hung.silent_s))

    def _note_moments(self) -> None:
        """When the workers had restored and when they made their first step, by their own clocks."""
        rank_0 = self._seen.workers.get(0)
        if rank_0 is None:
            return
        for event in sorted(rank_0.events.values(), key=lambda event: event.at_s):
            if event.kind not in self._seen.noted:
                self._seen.noted.add(event.kind)
                text = "the last checkpoint is loaded"
                if event.kind == "FIRST_STEP":
                    text = "training goes on" if "RESTORED" in rank_0.events else "training begins"
                self._note(event.kind.lower(), text, rank=0, step=event.step, at_s=event.at_s)

    # -- what is ordered -------------------------------------------------------------------------------------------

    async def _obey(self, orders: Sequence[Order]) -> None:
        attempt = self.supervisor.attempt
        for order in orders:
            if attempt != self.supervisor.attempt and isinstance(order, (AskToStop, End, DumpStacks)):
                continue  # looking at stacks takes a while: these were meant for workers that have gone
            match order:
                case Start(attempt, world_size):
                    await self._start(attempt, world_size)
                case AskToStop(reason):
                    self._do(self._ask_to_stop(reason))
                case End(ranks):
                    self._nodes.kill(self.supervisor.attempt, ranks)
                case DumpStacks(ranks):
                    await self._nodes.dump_stacks(ranks)
                case Tell(what, text, of_attempt, rank):
                    self._note(what, text, attempt=of_attempt, rank=rank)
                case Finish():
                    self.finish = order
                    await self._learn_checkpoint()  # it may have come after the last look
                    self._note("finished", f"{order.outcome}: {order.reason}")
                    self._show()
                    self._is_over.set()

    async def _start(self, attempt: int, world_size: int) -> None:
        self._seen = _Seen(StepWatch(self._spec.step_timeout_s, self._spec.is_start_watched))
        await self._see_off(world_size)
        await self._nodes.launch(
            WorkerSpec(
                identity=Identity(
                    run=self._spec.name, attempt=attempt, world_size=world_size, local_world_size=world_size
                ),
                coordinator=self._coordinator,
                checkpoints=self._spec.checkpoints,
                max_restarts=self._spec.max_restarts,
            )
        )
        if self.supervisor.phase is Phase.STOPPING and self.supervisor.attempt == attempt:
            await self._ask_to_stop(self._stop_reason)  # asked before there was anybody to hear it

    async def _see_off(self, world_size: int) -> None:
        """Members of the attempt before whom nobody of this one replaces: they have ended, or must not go on. Ranks
        begin together only when those are gone, which would take a lease.
        """
        with contextlib.suppress(StrataError):
            found = await self._client.list_workers(job_id=self._spec.name)
            for each in found.workers:
                if _rank_of(each) >= world_size:
                    replaced = await self._client.register_worker(each.worker_id, job_id=self._spec.name, takeover=True)
                    await replaced.deregister("its attempt is over")

    async def _ask_to_stop(self, reason: str) -> None:
        """Workers that have a context agree on a step. Scripts without one know only the signal; and as long as not all
        workers have joined, nobody has made a step that could be saved.
        """
        self._stop_reason = reason
        attempt, ranks = self.supervisor.attempt, sorted(self.supervisor.running)
        have_context = set(self._seen.workers)
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

    # -- telling ---------------------------------------------------------------------------------------------------

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
        self._last_event = text
        self._shower.say(event)
        self._write_status()

    def _write_status(self) -> None:
        supervisor = self.supervisor
        changed = {
            "state": self.finish.outcome if self.finish is not None else STATES[supervisor.phase],
            "attempt": max(supervisor.attempt, 0),
            "world_size": supervisor.world_size,
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

    def _show(self) -> None:
        self._write_status()
        supervisor = self.supervisor
        self._shower.show(
            RunView(
                name=self._spec.name,
                phase=supervisor.phase.value if self.finish is None else self.finish.outcome,
                attempt=max(supervisor.attempt, 0),
                world_size=supervisor.world_size,
                num_restarts=supervisor.num_restarts,
                max_restarts=self._spec.max_restarts,
                elapsed_s=self._now_s() - self._began_s,
                workers=[_view_of(rank, worker) for rank, worker in sorted(self._seen.workers.items())],
                checkpoint=self._checkpoint_in_words(),
                last_event=self._last_event,
                directory=str(self._directory.path),
            )
        )

    def _checkpoint_in_words(self) -> str:
        last = self._checkpoint
        return checkpoint_in_words(
            (last.checkpoint.step, self._clock.wall_s() - last.committed_at_s) if last is not None else None,
            [
                (int(each.metrics.get(METRICS.saving_step, NOT_SAVING)), each.metrics.get(METRICS.saving_fraction, 0.0))
                for each in self._seen.workers.values()
            ],
        )

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)

    def _now_s(self) -> float:
        return self._clock.monotonic_s()


def _rank_of(worker: WorkerInfo) -> int:
    return worker.rank if worker.launch_rank is None else worker.launch_rank


def _view_of(rank: int, worker: WorkerInfo) -> WorkerView:
    return WorkerView(
        rank=rank,
        state=worker.state,
        step=worker.step,
        epoch=worker.epoch,
        metrics={name: value for name, value in worker.metrics.items() if not METRICS.is_ours(name)},
        silent_s=worker.silent_s,
    )
