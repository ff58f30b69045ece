"""The driver of a study: it carries out the actions of the state machine and reports to it what happened.

It is one asyncio program. Messages of trials, exits of their processes and answers of the sampler become events, which
one coroutine handles in order: facts are written to the journal before their actions are carried out. Every trial is a
run of its own, whose processes are started through the port of nodes: it has its own job at the coordinator and its own
checkpoints, so `strata.init()` resumes it without any code for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from strata.checkpoint.tools.clone import clone, newest
from strata.clock import SystemClock
from strata.errors import ConfigError, NoCheckpoint, StrataError
from strata.identity import Identity
from strata.launch.environment import NEEDED_WORLD_SIZE, WorkerSpec
from strata.launch.nodes.base import RoomChanged
from strata.tune import endpoint
from strata.tune import messages as m
from strata.tune.histories import abandoned, directory_of
from strata.tune.processes import NOTHING_TO_SAVE_S, Process, ProcessGroup
from strata.tune.state import events as e
from strata.tune.state.actions import Ask, Finish, Kill, Start, Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from typing import Any

    from strata.checkpoint import CheckpointMetadata
    from strata.clock import Clock
    from strata.coordinator.client import AsyncCoordinatorClient
    from strata.launch.nodes.shared import SharedNodes
    from strata.launch.protocol import WorkerExit
    from strata.tune.endpoint import Connection
    from strata.tune.journal import StudyJournal
    from strata.tune.search import Search
    from strata.tune.state.actions import Action, Handled

log = logging.getLogger(__name__)

STOP_S = 60.0
"""Time for a trial to stop; then its processes are killed."""
LAST_MESSAGES_S = 10.0
"""Time to receive what a process has sent before it exited."""
END_S = 300.0
"""Time for the other ranks of a trial to end after one has returned; then they are killed."""
ECHO_S = 2.0
"""Time for the cause to appear after a rank has failed because a peer is gone."""
NO_ROOM_S = 0.5
"""Pause before a trial is started again that found no free slot, because a node was lost a moment ago."""
CHECKPOINTS_S = 0.5
"""Time between two looks for checkpoints of running trials, while one of them may be given more slots."""
MAX_CLONES = 5
"""Attempts to clone the newest checkpoint of a trial that saves and removes checkpoints meanwhile."""
MAX_DIGITS = 9
"""Digits of a world size."""
DROP_JOBS_S = 5.0
"""Time to remove the jobs of the last trials from the coordinator."""


class Driver:
    def __init__(
        self,
        search: Search,
        journal: StudyJournal,
        nodes: SharedNodes,
        client: AsyncCoordinatorClient,
        *,
        coordinator: str,
        directory: Path,
        num_slots: int,
        workers_per_trial: int = 1,
        max_slots_per_trial: int = 1,
        timeout_s: float | None = None,
        grace_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            num_slots: Largest number of trials at a time.
            workers_per_trial: Workers of a slot.
            max_slots_per_trial: Slots that one trial may take if no other needs them.
            grace_s: Time for running trials to save after `stop`; then they are killed.
        """
        self._search = search
        self._journal = journal
        self._nodes = nodes
        self._client = client
        self._coordinator = coordinator
        self._directory = directory
        self._num_slots = num_slots
        self._workers_per_trial = workers_per_trial
        self._max_slots_per_trial = max_slots_per_trial
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._is_stopping = False
        """`stop` was called."""
        self._clock = clock or SystemClock()
        self._events: asyncio.Queue[e.Event | Finish | BaseException] = asyncio.Queue()
        """What has happened; an exception is the failure of a task, and `Finish` an end at once."""
        self._asks: asyncio.Queue[int] = asyncio.Queue()
        self._groups: dict[int, ProcessGroup] = {}
        """By slot, the first one of a trial that has several."""
        self._by_rank: dict[int, ProcessGroup] = {}
        """By rank at the nodes."""
        self._num_launches = sum(trial.lease for trial in search.state.trials.values())
        self._tasks: set[asyncio.Task[None]] = set()
        self._drops: set[asyncio.Task[None]] = set()
        self._finish: Finish | None = None
        self._is_population = search.state.spec.scheduler == "pbt"
        """Trials continue from the checkpoints of others."""
        self._jobs: dict[int, str] = {}
        """Job of each trial that has started."""

    async def run(
        self,
        place: Path,
        recovered: Handled | None,
        *,
        publish: Callable[[m.Endpoint], None],
        host: str = "",
    ) -> Finish:
        """Run until the study ends.

        Args:
            place: Directory for sockets and secrets, which only this user can enter.
            recovered: What a resumed study begins with.
            publish: Called with the endpoint before the first trial starts.
            host: Address of this machine that other machines reach; empty: all nodes are on this one.
        """
        async with endpoint.serve(self._connected, place, host=host) as found:
            publish(found)
            self._spawn(self._answer())
            self._spawn(self._watch_nodes())
            if self._timeout_s is not None:
                self._spawn(self._stop_after(self._timeout_s))
            self._spawn(self._expire_silent())
            if self._max_slots_per_trial > 1:
                self._spawn(self._watch_checkpoints())
            try:
                if recovered is not None:
                    self._carry_out(recovered)
                    self._spawn(self._drop_old_jobs())
                self._handle(self._resized())
                while self._finish is None:
                    event = await self._events.get()
                    if isinstance(event, BaseException):
                        raise event
                    if isinstance(event, Finish):
                        return event
                    self._handle(event)
                return self._finish
            finally:
                await self._close()

    def stop(self, reason: str, *, is_now: bool = False) -> None:
        """Let running trials save, and end the study, which can be continued. `is_now` or the end of the grace period
        ends the study at once: its trials repeat the steps since their last checkpoints.
        """
        at_once = Finish(reason, is_complete=False)
        if not self._is_stopping:
            self._events.put_nowait(e.StopRequested(reason=reason, wait_s=self._grace_s))
            self._spawn(self._end_without_saves())
        if is_now:
            self._events.put_nowait(at_once)
        elif not self._is_stopping:
            self._spawn(self._finish_after(self._grace_s, at_once))
        self._is_stopping = True

    def order(self, trial: int, order: e.Order, reason: str) -> None:
        """Stop a trial for good, or let it save and start again. Returns once that is in the journal.

        Raises:
            ConfigError: The trial cannot be stopped or started again now; nothing was changed.
        """
        handled = self._search.handle(e.Ordered(trial=trial, order=order, reason=reason), now_s=self._clock.wall_s())
        if handled.ignored:
            raise ConfigError(handled.ignored, field="trial")
        try:
            self._carry_out(handled)
        except StrataError as error:
            self._events.put_nowait(error)  # `run` raises it: the state is ahead of the journal
            raise
        if self._finish is not None:  # it was the last one, and `run` waits for an event
            self._events.put_nowait(self._finish)

    async def _finish_after(self, delay_s: float, finish: Finish) -> None:
        await asyncio.sleep(delay_s)
        log.warning("trials that have not saved within %g s are killed", delay_s)
        self._events.put_nowait(finish)

    async def _end_without_saves(self) -> None:
        """Kill trials that do not stop soon and have nothing to save: without `strata.init()`, a trial has no job."""
        await asyncio.sleep(NOTHING_TO_SAVE_S)
        try:
            jobs = {each.job_id for each in await self._client.list_jobs()}
        except StrataError:
            return  # perhaps they save
        for group in list(self._groups.values()):
            if group.stop is not None and not group.is_over and self.job_of(group.start.trial) not in jobs:
                log.info("trial %d has nothing to save and is killed", group.start.trial)
                self._kill(group)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for group in self._groups.values():
            if group.killer is not None:
                group.killer.cancel()
        if self._drops:
            await asyncio.wait(self._drops, timeout=DROP_JOBS_S)

    def _handle(self, event: e.Event) -> None:
        self._carry_out(self._search.handle(event, now_s=self._clock.wall_s()))

    def _carry_out(self, handled: Handled) -> None:
        if handled.ignored:
            log.debug("ignored: %s", handled.ignored)
        is_durable = not all(isinstance(fact, e.Reported) for fact in handled.facts)
        self._journal.append(handled.facts, is_durable=is_durable)
        for action in handled.actions:
            self._act(action)
        ends = (
            each for each in handled.facts if isinstance(each, e.Finished | e.Failed | e.Lost | e.Stopped | e.Pruned)
        )
        for trial in dict.fromkeys(each.trial for each in ends):
            self._drop_job_if_over(trial)
        self._search.carried_out(handled.facts, now_s=self._clock.monotonic_s())

    def _act(self, action: Action) -> None:
        match action:
            case Ask(trial):
                self._asks.put_nowait(trial)
            case Start():
                self._start(action)
            case Stop():
                self._stop(action)
            case Kill():
                group = self._groups[action.slot]
                self._nodes.kill(group.launch, group.running)
            case Finish():
                self._finish = action

    def _resized(self) -> e.Resized:
        """Return how many trials the nodes have room for, and which have lost their nodes."""
        lost = [
            group.start.trial
            for group in self._groups.values()
            if any(each.is_node_lost for each in group.exits)
            and self._search.state.trials[group.start.trial].lease == group.start.lease
        ]
        num_slots = min(self._nodes.room // self._workers_per_trial, self._num_slots)
        return e.Resized(num_slots=num_slots, lost=tuple(lost), max_slots_per_trial=self._max_slots_per_trial)

    # -- processes -------------------------------------------------------------------------------------------------

    def _start(self, action: Start) -> None:
        job = self.job_of(action.trial)
        if self._jobs.setdefault(action.trial, job) != job:
            self._drop_job(self._jobs[action.trial])
            self._jobs[action.trial] = job
        self._num_launches += 1
        num = self._workers_per_trial
        ranks = [rank for slot in action.slots for rank in range(slot * num, (slot + 1) * num)]
        processes = {rank: Process(number) for number, rank in enumerate(ranks)}
        group = ProcessGroup(action, self._num_launches, processes)
        self._groups[action.slot] = group
        self._by_rank |= dict.fromkeys(processes, group)
        self._spawn(self._launch(group, ranks))

    async def _launch(self, group: ProcessGroup, ranks: Sequence[int]) -> None:
        placement = await self._nodes.place(ranks)
        if placement is None:
            return
        await self._seed(group.start)
        group.identities = placement.identities
        identity = Identity(run=self._search.state.spec.name, attempt=group.launch)
        spec = WorkerSpec(identity=identity, coordinator=self._coordinator, checkpoints="none")
        await self._nodes.start(placement, spec)

    async def _connected(self, hello: m.Hello, connection: Connection) -> None:
        group = self._by_rank.get(hello.rank)
        process = group.processes.get(hello.rank) if group is not None else None
        if group is None or process is None or group.launch != hello.launch or process.exit is not None:
            return
        if process.connection is not None:
            process.connection.close()  # broken, though we have not noticed yet
        process.connection = connection
        process.is_read.clear()
        connection.send(self._order(group, process.rank))
        if group.stop is not None:
            connection.send(group.stop)
        try:
            async for message in connection.messages():
                self._received(group, process, message)
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._events.put_nowait(error)
        finally:
            if process.connection is connection:
                process.connection = None
                process.is_read.set()

    def _order(self, group: ProcessGroup, rank: int) -> m.Order:
        start = group.start
        identity = replace(group.identities[rank], run=self.job_of(start.trial), attempt=start.lease - 1)
        checkpoints = self._checkpoints(start.trial)
        ranks = list(group.processes)
        seats, num_seats = self._nodes.seats(ranks[rank], ranks)
        return m.Order(
            trial=start.trial,
            lease=start.lease,
            config=start.config,
            metrics=self._search.state.objectives.names,
            worker=WorkerSpec(identity=identity, coordinator=self._coordinator, checkpoints=str(checkpoints)),
            seats=seats,
            num_seats=num_seats,
        )

    def _checkpoints(self, number: int) -> Path:
        return self._directory / directory_of(self._search.state.trials[number])

    async def _seed(self, start: Start) -> None:
        """Give a trial that continues from another one a clone of its checkpoint, unless it has one: then it was
        started again since.
        """
        directory = self._checkpoints(start.trial)
        if not self._search.state.trials[start.trial].origin or directory.exists():
            return
        clone = await asyncio.to_thread(_clone, start.checkpoint, directory)
        if clone is None:
            log.warning("trial %d begins anew: checkpoint %s is gone", start.trial, start.checkpoint)
        else:
            needed = _needed_world_size(clone.metadata)
            saved = e.Saved(
                trial=start.trial, lease=start.lease, step=clone.step, checkpoint=clone.path, world_size=needed
            )
            self._events.put_nowait(saved)
        await self._remove_abandoned(start.trial)

    async def _remove_abandoned(self, number: int) -> None:
        """Remove the earlier histories of a trial that has just begun a new one."""
        trials, folder = self._search.state.trials, self._checkpoints(number).parent
        for path in abandoned(trials[number], _names(folder), trials.values()):
            await asyncio.to_thread(shutil.rmtree, self._directory / path, ignore_errors=True)

    def _received(self, group: ProcessGroup, process: Process, message: m.FromTrial) -> None:
        if isinstance(message, m.Hello) or message.lease != group.start.lease:
            return
        if message.number > process.number:  # else it was sent again, because our answer was lost
            process.number = message.number
            match message:
                case m.Report(step=step, values=values):
                    trial, lease = group.start.trial, group.start.lease
                    self._handle(e.Reported(trial=trial, lease=lease, step=step, values=values))
                case m.Settle():
                    self._journal.sync()
                case m.Result():
                    group.result = message
                case m.Failure(reason=reason):
                    group.failure = group.failure or reason
        if process.connection is not None:
            process.connection.send(m.Answer(number=message.number))

    def _stop(self, action: Stop) -> None:
        group = self._groups[action.slot]
        group.stop = m.StopTrial(reason=action.reason, is_saving=action.is_saving)
        for process in group.processes.values():
            if process.connection is not None:
                process.connection.send(group.stop)
        self._kill_after(group, STOP_S)
        if self._is_population and action.is_saving:
            self._spawn(self._ask_others_to_save(action.trial))

    async def _ask_others_to_save(self, number: int) -> None:
        """Let the other trials save: one that pauses may continue from any of them."""
        for trial in self._search.state.running:
            if trial.number != number:
                with contextlib.suppress(StrataError):
                    reason = f"trial {number} may continue from here"
                    await self._client.send_command("CHECKPOINT_NOW", job_id=self.job_of(trial.number), reason=reason)

    def _kill_after(self, group: ProcessGroup, delay_s: float) -> None:
        if group.killer is None:
            group.killer = asyncio.get_running_loop().call_later(delay_s, self._kill, group)

    def _kill(self, group: ProcessGroup) -> None:
        for rank in group.running:
            group.processes[rank].is_killed = True
        self._nodes.kill(group.launch, group.running)

    async def _watch_nodes(self) -> None:
        while True:
            event = await self._nodes.next_event()
            if isinstance(event, RoomChanged):
                log.info("%s", event.why)
                self._events.put_nowait(self._resized())
            else:
                self._exited(self._by_rank[event.rank], event)

    def _exited(self, group: ProcessGroup, exited: WorkerExit) -> None:
        group.processes[exited.rank].exit = exited
        if group.is_over:
            if group.killer is not None:
                group.killer.cancel()
            self._spawn(self._ended(group))
        elif not group.others_follow:
            self._kill(group)
        else:
            self._kill_after(group, ECHO_S if exited.is_echo else END_S)

    async def _ended(self, group: ProcessGroup) -> None:
        """Turn the ends of all processes into an event, once their last messages and the checkpoint are known."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_MESSAGES_S):
                for process in group.processes.values():
                    if process.connection is not None:
                        await process.is_read.wait()
        if not group.identities:
            await asyncio.sleep(NO_ROOM_S)
        await self._find_checkpoint(group.start.trial, group.start.lease)
        if self._is_population:
            for trial in self._search.state.running:
                await self._find_checkpoint(trial.number, trial.lease)
        self._events.put_nowait(group.outcome())

    async def _find_checkpoint(self, trial: int, lease: int) -> None:
        """A coordinator that cannot answer changes nothing: the trial itself finds its checkpoint when it resumes."""
        with contextlib.suppress(StrataError):
            found = await self._client.latest_checkpoint(job_id=self.job_of(trial))
            if found is not None and found.checkpoint.path != self._search.state.trials[trial].checkpoint:
                path, step = found.checkpoint.path, found.checkpoint.step
                needed = _needed_world_size(found.metadata)
                self._events.put_nowait(
                    e.Saved(trial=trial, lease=lease, step=step, checkpoint=path, world_size=needed)
                )

    async def _watch_checkpoints(self) -> None:
        """Look for the first checkpoints of running trials while slots are spare: only a trial with a checkpoint is
        restarted with more of them.
        """
        while True:
            await asyncio.sleep(CHECKPOINTS_S)
            state = self._search.state
            for trial in state.running if state.has_spare_slots else ():
                if not trial.checkpoint:
                    await self._find_checkpoint(trial.number, trial.lease)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def job_of(self, trial: int) -> str:
        """Return the job of a trial at the coordinator: a new one each time that it continues from another trial."""
        origin = self._search.state.trials[trial].origin
        return f"{self._search.state.spec.name}.{trial}" + (f"-{origin}" if origin else "")

    def _drop_job_if_over(self, number: int) -> None:
        trial = self._search.state.trials[number]
        if trial.is_over and trial.lease:
            self._drop_job(self.job_of(number))

    def _drop_job(self, job: str) -> None:
        """Remove a job whose processes have exited: a coordinator keeps jobs for ever."""

        async def drop() -> None:
            with contextlib.suppress(StrataError):
                await self._client.drop_job(job, force=True, reason="the trial has ended")

        task = asyncio.create_task(drop())
        self._drops.add(task)
        task.add_done_callback(self._drops.discard)

    async def _drop_old_jobs(self) -> None:
        """Remove the jobs of trials that had ended, or had continued from others, when an earlier driver was killed."""
        trials = self._search.state.trials
        ours = re.compile(rf"{re.escape(self._search.state.spec.name)}\.(\d+)(-\d+)?")
        with contextlib.suppress(StrataError):
            for job in await self._client.list_jobs():
                found = ours.fullmatch(job.job_id)
                trial = trials.get(int(found[1])) if found is not None else None
                if trial is not None and (trial.is_over or job.job_id != self.job_of(trial.number)):
                    self._drop_job(job.job_id)

    # -- the sampler and the time ----------------------------------------------------------------------------------

    async def _answer(self) -> None:
        while True:
            trial = await self._asks.get()
            self._events.put_nowait(await asyncio.to_thread(self._search.answer, trial))

    async def _stop_after(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        self._events.put_nowait(e.StopRequested(reason=f"timeout of {timeout_s:g} s"))

    async def _expire_silent(self) -> None:
        watch = self._search.watch
        while watch is not None:
            await asyncio.sleep(min(max(watch.limit_s / 10, 0.01), 1.0))
            for event in watch.overdue(now_s=self._clock.monotonic_s()):
                self._events.put_nowait(event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._events.put_nowait(error)


def _names(folder: Path) -> list[str]:
    try:
        return [each.name for each in folder.iterdir()]
    except FileNotFoundError:
        return []


def _needed_world_size(metadata: Mapping[str, Any]) -> int:
    """Return the only world size that can resume from a checkpoint; 0: any."""
    text = str(metadata.get(NEEDED_WORLD_SIZE, ""))
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0


def _clone(checkpoint: str, directory: Path) -> CheckpointMetadata | None:
    """Clone a checkpoint, or the newest one beside it if it was removed; return None if there is none."""
    found: Path | None = Path(checkpoint)
    for _ in range(MAX_CLONES):
        if found is None:
            break
        with contextlib.suppress(NoCheckpoint):
            return clone(found, directory)
        found = newest(Path(checkpoint).parent)
    return None
