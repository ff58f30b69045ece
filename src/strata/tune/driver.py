"""The driver of a study: it carries out the actions of the state machine and reports to it what happened.

It is one asyncio program. Messages of trials, exits of their processes and answers of the sampler become events, which
one coroutine handles in order: facts are written to the journal before their actions are carried out. Every trial is a
process of its own, started through the port of nodes as a run of one rank: it has its own job at the coordinator and
its own checkpoints, so `strata.init()` resumes it without any code for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from strata.clock import SystemClock
from strata.errors import StrataError
from strata.identity import Identity
from strata.launch.environment import STOPPED, WorkerSpec, worker_environment
from strata.tune import messages as m
from strata.tune.state import events as e
from strata.tune.state.actions import Ask, Finish, Kill, Start, Stop

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path
    from typing import Any

    from strata.clock import Clock
    from strata.coordinator.client import AsyncCoordinatorClient
    from strata.launch.nodes.base import Node
    from strata.launch.protocol import WorkerExit
    from strata.tune.journal import StudyJournal
    from strata.tune.search import Search
    from strata.tune.state.actions import Action, Handled

log = logging.getLogger(__name__)

STOP_S = 60.0
"""Time for a trial to stop; then its process is killed."""
LAST_MESSAGES_S = 10.0
"""Time to receive what a process has sent before it exited."""


@dataclass(slots=True)
class _Process:
    """The process of a trial."""

    start: Start
    launch: int
    stop: m.StopTrial | None = None
    writer: asyncio.StreamWriter | None = None
    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    """All its messages were received."""
    result: m.Result | None = None
    failure: str = ""
    killer: asyncio.TimerHandle | None = None


class Driver:
    def __init__(
        self,
        search: Search,
        journal: StudyJournal,
        node: Node,
        client: AsyncCoordinatorClient,
        *,
        coordinator: str,
        directory: Path,
        num_slots: int,
        timeout_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._search = search
        self._journal = journal
        self._node = node
        self._client = client
        self._coordinator = coordinator
        self._directory = directory
        self._num_slots = num_slots
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._events: asyncio.Queue[e.Event] = asyncio.Queue()
        self._asks: asyncio.Queue[int] = asyncio.Queue()
        self._processes: dict[int, _Process] = {}
        """By slot."""
        self._num_launches = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: asyncio.Event = asyncio.Event()
        """A task has failed."""
        self._finish: Finish | None = None

    async def run(self, socket_path: Path, recovered: Handled | None) -> Finish:
        """Run until the study ends. `recovered`: what a resumed study begins with."""
        server = await asyncio.start_unix_server(self._connected, path=socket_path, limit=m.MAX_BYTES)
        self._spawn(self._answer())
        self._spawn(self._watch_exits())
        if self._timeout_s is not None:
            self._spawn(self._stop_after(self._timeout_s))
        self._spawn(self._expire_silent())
        try:
            if recovered is not None:
                self._carry_out(recovered)
            self._handle(e.Resized(num_slots=self._num_slots))
            while self._finish is None:
                event = await self._next_event()
                self._handle(event)
                if isinstance(event, e.Reported):
                    self._let_continue(event)
            return self._finish
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for process in self._processes.values():
                if process.killer is not None:
                    process.killer.cancel()
            await self._node.close()

    async def _next_event(self) -> e.Event:
        """Return the next event; raise the error of a task that has failed."""
        waits = [asyncio.ensure_future(self._events.get()), asyncio.ensure_future(self._error.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in [each for each in self._tasks if each.done()]:
                task.result()
            event = waits[0].result()
            assert not isinstance(event, bool)
            return event
        finally:
            for each in waits:
                each.cancel()

    def _handle(self, event: e.Event) -> None:
        self._carry_out(self._search.handle(event, now_s=self._clock.wall_s()))

    def _carry_out(self, handled: Handled) -> None:
        if handled.ignored:
            log.debug("ignored: %s", handled.ignored)
        is_durable = not all(isinstance(fact, e.Reported) for fact in handled.facts)
        self._journal.append(handled.facts, is_durable=is_durable)
        for action in handled.actions:
            self._act(action)
        self._search.carried_out(handled.facts, now_s=self._clock.monotonic_s())

    def _act(self, action: Action) -> None:
        match action:
            case Ask(trial):
                self._asks.put_nowait(trial)
            case Start():
                self._num_launches += 1
                self._processes[action.slot] = process = _Process(action, self._num_launches)
                self._spawn(self._launch(process))
            case Stop():
                self._stop(action)
            case Kill():
                self._node.kill([action.slot])
            case Finish():
                self._finish = action

    # -- processes -------------------------------------------------------------------------------------------------

    async def _launch(self, process: _Process) -> None:
        slot = process.start.slot
        size = max(self._num_slots, slot + 1)
        identity = Identity(
            run=self._search.state.spec.name,
            attempt=process.launch,
            rank=slot,
            local_rank=slot,
            world_size=size,
            local_world_size=size,
        )
        await self._node.launch([WorkerSpec(identity=identity, coordinator=self._coordinator, checkpoints="none")])

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process = None
        try:
            hello = await _receive(reader)
            if isinstance(hello, m.Hello):
                process = self._processes.get(hello.slot)
            if process is None or process.launch != hello.launch:  # type: ignore[union-attr] # a `Hello`, then
                process = None
                return
            process.writer = writer
            writer.write(m.encode(process.stop or await self._order(process.start)))
            while (message := await _receive(reader)) is not None:
                self._received(process, message)
        except (OSError, msgspec.DecodeError, ValueError) as error:
            log.warning("lost the connection to a trial: %s", error)
        finally:
            if process is not None:
                process.writer = None
                process.is_read.set()
            writer.close()

    async def _order(self, start: Start) -> m.Order:
        checkpoints = self._directory / "trials" / f"{start.trial:05}" / "checkpoints"
        identity = Identity(
            run=self.job_of(start.trial), attempt=start.lease - 1, master_port=await self._node.free_port()
        )
        spec = WorkerSpec(identity=identity, coordinator=self._coordinator, checkpoints=str(checkpoints))
        metrics = self._search.state.objectives.names
        return m.Order(trial=start.trial, config=start.config, metrics=metrics, environment=worker_environment(spec))

    def _received(self, process: _Process, message: m.FromTrial) -> None:
        trial, lease = process.start.trial, process.start.lease
        match message:
            case m.Report(step=step, values=values):
                self._events.put_nowait(e.Reported(trial=trial, lease=lease, step=step, values=values))
            case m.Result():
                process.result = message
            case m.Failure(reason=reason):
                process.failure = reason

    def _let_continue(self, report: e.Reported) -> None:
        """Answer a report, unless the trial was asked to stop, which is an answer too."""
        slot = self._search.state.trials[report.trial].slot
        process = self._processes.get(slot) if slot is not None else None
        if process is None or (process.start.trial, process.start.lease) != (report.trial, report.lease):
            return
        if process.stop is None and process.writer is not None:
            process.writer.write(m.encode(m.Continue()))

    def _stop(self, action: Stop) -> None:
        process = self._processes[action.slot]
        process.stop = m.StopTrial(reason=action.reason, is_saving=action.is_saving)
        if process.writer is not None:
            process.writer.write(m.encode(process.stop))
        loop = asyncio.get_running_loop()
        process.killer = loop.call_later(STOP_S, self._node.kill, [action.slot])

    async def _watch_exits(self) -> None:
        while True:
            exited = await self._node.next_exit()
            self._spawn(self._exited(self._processes[exited.rank], exited))

    async def _exited(self, process: _Process, exited: WorkerExit) -> None:
        """Turn the end of a process into an event, once its last messages and its checkpoint are known."""
        if process.killer is not None:
            process.killer.cancel()
        if process.writer is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.is_read.wait(), LAST_MESSAGES_S)
        trial, lease = process.start.trial, process.start.lease
        await self._find_checkpoint(trial, lease)
        if exited.code == 0:
            values = process.result.values if process.result is not None else None
            self._events.put_nowait(e.Finished(trial=trial, lease=lease, values=values))
        elif exited.code == STOPPED:
            self._events.put_nowait(e.Stopped(trial=trial, lease=lease))
        elif exited.code < 0:
            self._events.put_nowait(e.Lost(trial=trial, lease=lease, reason=exited.how))
        else:
            reason = process.failure or exited.how
            self._events.put_nowait(e.Failed(trial=trial, lease=lease, reason=reason))

    async def _find_checkpoint(self, trial: int, lease: int) -> None:
        """A coordinator that cannot answer changes nothing: the trial itself finds its checkpoint when it resumes."""
        with contextlib.suppress(StrataError):
            found = await self._client.latest_checkpoint(job_id=self.job_of(trial))
            if found is not None and found.checkpoint.path != self._search.state.trials[trial].checkpoint:
                path, step = found.checkpoint.path, found.checkpoint.step
                self._events.put_nowait(e.Saved(trial=trial, lease=lease, step=step, checkpoint=path))

    def job_of(self, trial: int) -> str:
        """Return the job of a trial at the coordinator."""
        return f"{self._search.state.spec.name}.{trial}"

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
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)
        else:
            self._error.set()


async def _receive(reader: asyncio.StreamReader) -> m.FromTrial | None:
    line = await reader.readline()
    return m.from_trial.decode(line) if line.endswith(b"\n") else None
