"""`TrainingOrchestrator`: one object for a job. A worker's calls to the coordinator and its checkpoints, and a function
that is run on workers.

    orchestrator = TrainingOrchestrator("localhost:50051")
    orchestrator.register_worker("worker-01")
    orchestrator.register_dataset("images", total_samples=1_281_167, shard_size=10_000)
    while (shard := orchestrator.get_shard("images")) is not None:
        …
        orchestrator.heartbeat(step=step, loss=loss)
        orchestrator.ack_shards([shard])
    orchestrator.barrier("epoch-0", step=step)

    results = TrainingOrchestrator().run(train, 1e-3, workers=4)

Nothing is connected, and no coordinator brought along, before a call needs it.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import secrets
import shutil
import signal
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from strata.clock import SystemClock
from strata.coordinator.state.job import DEFAULT_JOB
from strata.errors import ConfigError, RunFailed, StaleIncarnation, UnknownWorker
from strata.train import function as calling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from strata.checkpoint import CheckpointManager, CheckpointMetadata, Save
    from strata.coordinator.client import ClientConfig, CoordinatorClient, Worker
    from strata.coordinator.embedded import EmbeddedCoordinator
    from strata.coordinator.state.events import CommandRecord, ShardEntry
    from strata.coordinator.state.shards import Shard
    from strata.coordinator.state.views import Progress
    from strata.launch.record.directory import RunDirectory
    from strata.launch.record.log import Which
    from strata.launch.supervisor import Finish

CALLED = "strata.train.function"
MEET_TIMEOUT_S = 300.0
"""For all workers to come to their first save."""
STOP_AGAIN_S = 1.0
"""Until a run that begins is asked again to stop: it may not hear yet."""
MAX_DRAWN = 16
"""Of the numbers of several workers, in the name of their session."""


class TrainingOrchestrator:
    """For one worker of a job: its process makes one of these."""

    def __init__(
        self,
        coordinator_url: str | None = None,
        *,
        job_id: str = DEFAULT_JOB,
        checkpoints: str | os.PathLike[str] = "checkpoints",
        config: ClientConfig | None = None,
        **checkpoint_options: Any,
    ) -> None:
        """
        Args:
            coordinator_url: Where the coordinator is; left out, one is brought along inside this process.
            checkpoints: The directory or URL of `save` and `restore`.
            checkpoint_options: For `CheckpointManager`: `keep_count`, `compression`, `storage_options`, …
        """
        self.job_id = job_id
        self._url = coordinator_url
        self._config = config
        self._place = checkpoints
        self._checkpoint_options = checkpoint_options
        self._client: CoordinatorClient | None = None
        self._embedded: EmbeddedCoordinator | None = None
        self._worker: Worker | None = None
        self._manager: CheckpointManager | None = None
        self._manager_generation = 0

    def connect(self) -> Self:
        """Calls connect by themselves; this one finds out now whether somebody answers.

        Raises:
            CoordinatorUnavailable: Nobody does.
        """
        self._connected()
        return self

    def close(self) -> None:
        """Waits for the last save, leaves the job and hangs up."""
        try:
            if self._manager is not None:
                self._manager.close()
        finally:
            self._manager = None
            try:
                if self._worker is not None and self._worker.lost is None:
                    self.deregister("closed")
            finally:
                self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> CoordinatorClient:
        if self._client is None:
            from strata.coordinator.client import CoordinatorClient  # noqa: PLC0415 - gRPC, which `run` needs not

            url = self._url
            if url is None:
                from strata.coordinator.embedded import EmbeddedCoordinator  # noqa: PLC0415

                self._embedded = EmbeddedCoordinator().start()
                url = self._embedded.address
            try:
                self._client = CoordinatorClient(url, config=self._config)
                self._client.connect()
            except BaseException:
                self._hang_up()
                raise
        return self._client

    def _hang_up(self) -> None:
        client, self._client, self._worker = self._client, None, None
        embedded, self._embedded = self._embedded, None
        if client is not None:
            client.close()
        if embedded is not None:
            embedded.stop()

    # -- the worker ------------------------------------------------------------------------------------------------

    def register_worker(self, worker_id: str, *, capacity: float = 1.0) -> Worker:
        """Joins the job; what is returned knows `rank` and `world_size`. Heartbeats go by themselves from here on."""
        self._worker = self._connected().register_worker(worker_id, job_id=self.job_id, capacity=capacity)
        self._worker.report(session=float(secrets.randbits(52)))
        return self._worker

    @property
    def worker(self) -> Worker:
        """
        Raises:
            UnknownWorker: None is registered.
            StaleIncarnation: The coordinator took it for dead.
        """
        if self._worker is None:
            raise UnknownWorker("no worker is registered here; call register_worker(worker_id) first")
        if self._worker.lost is not None:
            raise StaleIncarnation(
                f"worker {self._worker.worker_id!r} was lost ({self._worker.lost}); register it again"
            )
        return self._worker

    def heartbeat(self, step: int | None = None, epoch: int | None = None, **metrics: float) -> list[CommandRecord]:
        """Tells now how far training is; gives the orders that have come, such as STOP."""
        worker = self.worker
        worker.report(state="TRAINING" if step is not None else None, step=step, epoch=epoch, **metrics)
        worker.heartbeat()
        return worker.take_commands()

    def barrier(
        self, barrier_id: str, step: int | None = None, *, timeout_s: float = 300.0, elastic: bool = True
    ) -> None:
        """Waits until all workers of the job are there. `elastic`: whoever they are by then; else a change of members
        breaks it.

        Raises:
            BarrierBroken: Somebody does not come; the message says who and why.
        """
        self.worker.barrier(barrier_id, step=step, timeout_s=timeout_s, elastic=elastic)

    def deregister(self, reason: str = "") -> None:
        """Leaves the job; the worker's shards move to the others at once."""
        self.worker.deregister(reason)
        self._worker = None

    # -- data ------------------------------------------------------------------------------------------------------

    def register_dataset(
        self,
        dataset_id: str,
        *,
        total_samples: int = 0,
        shard_size: int = 0,
        shards: Sequence[ShardEntry] = (),
        shuffle: bool = False,
        seed: int = 0,
    ) -> int:
        """Declares a dataset, by count or by list; gives its number of shards. The same again changes nothing."""
        return self._connected().register_dataset(
            dataset_id,
            job_id=self.job_id,
            total_samples=total_samples,
            shard_size=shard_size,
            shards=shards,
            shuffle=shuffle,
            seed=seed,
        )

    def get_shards(self, dataset_id: str | None = None, epoch: int | None = None) -> list[Shard]:
        """What is this worker's to read now, in that order; finished ones are left out."""
        return self.worker.shards(dataset_id, epoch=epoch)

    def get_shard(self, dataset_id: str | None = None, epoch: int | None = None) -> Shard | None:
        """The first of them; None if nothing is left to this worker."""
        return next(iter(self.get_shards(dataset_id, epoch)), None)

    def ack_shards(self, shards: Sequence[Shard]) -> Progress:
        """These have been trained on: nobody gets them again in this epoch."""
        return self.worker.ack(shards)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, state: Any, *, step: int, epoch: int = 0, **arguments: Any) -> Save:
        """As `CheckpointManager.save`; with several workers in the job, one checkpoint of all of them, who must all
        call it. The coordinator is told of it.
        """
        return self._checkpoints().save(state, step=step, epoch=epoch, **arguments)

    def restore(self, into: Mapping[str, Any], *, step: int | None = None, strict: bool = True) -> CheckpointMetadata:
        """Puts the last checkpoint, or that of a step, into modules, optimizers and the like; on all workers.

        Raises:
            NoCheckpoint: There is none.
        """
        return self._checkpoints().restore(into, step=step, strict=strict)

    def load(self, *, step: int | None = None) -> Any:
        """What was saved, as it was; on all workers.

        Raises:
            NoCheckpoint: There is none.
        """
        return self._checkpoints().load(step=step)

    def _checkpoints(self) -> CheckpointManager:
        """For the members of now: ranks and their number belong to a generation."""
        worker = self._worker
        generation = worker.latest_generation if worker is not None else 0
        if self._manager is None or generation != self._manager_generation:
            from strata.checkpoint import CheckpointManager, Ranks  # noqa: PLC0415 - not everybody saves
            from strata.launch.commit import CoordinatorCommit  # noqa: PLC0415

            if self._manager is not None:
                self._manager.close()
                self._manager = None
            ranks = commit = None
            if worker is not None:
                session = self._agreed_session(worker)
                ranks = Ranks(rank=worker.rank, size=worker.world_size, session=session)
                commit = CoordinatorCommit(worker)
                generation = worker.generation
            self._manager = CheckpointManager(self._place, ranks=ranks, commit=commit, **self._checkpoint_options)
            self._manager_generation = generation
        return self._manager

    def _agreed_session(self, worker: Worker) -> str:
        """The same on all workers and never before: what each has drawn, put together."""
        worker.heartbeat()
        while True:  # once, unless the members change between the two calls
            worker.barrier("strata/session", timeout_s=MEET_TIMEOUT_S, elastic=True)
            told = self._connected().list_workers(job_id=self.job_id)
            if told.generation == worker.generation:
                drawn = (f"{each.metrics.get('session', 0.0):.0f}" for each in told.workers[:MAX_DRAWN])
                return "/".join([self.job_id, *drawn])

    # -- functions -------------------------------------------------------------------------------------------------

    def run(
        self,
        train_fn: Callable[..., Any],
        /,
        *args: Any,
        workers: int | str = 2,
        engine: str = "local",
        name: str = "",
        max_restarts: int = 3,
        checkpoints: str | os.PathLike[str] = "",
        logs: str = "auto",
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `train_fn(*args, **kwargs)` on workers, as `strata run` does with a script; gives what they returned,
        in the order of their ranks.

        In the function `strata.init()` says which worker it is, and keeps checkpoints. When a worker dies, all begin
        again, from the last checkpoint if there is one. `strata ps`, `logs` and `stop` know the run. From any thread;
        Ctrl-C lets the workers save first; the second one does not.

        Args:
            workers: How many; "2:8" for a run that may shrink and grow.
            engine: Who starts them: "local" on this machine, "ray" on the cluster that RAY_ADDRESS names, or one of
                its own. On several machines all must share the directory of runs (STRATA_RUNS_DIR).
            name: What to call the run; made up if left out.
            max_restarts: How many failures the run may survive.
            checkpoints: A directory or URL for those of `strata.init()`; left out, in the run's directory.
            logs: Whose output is printed here: "rank0", "all" or "none". "auto" is that of rank 0.

        Raises:
            ConfigError: It cannot be run so; the message says what to change.
            InvalidArgument: The function or an argument cannot be handed to workers.
            RunFailed: The function raised, or a worker died too often; the message shows its traceback.
        """
        from strata.launch.record.log import parse_which  # noqa: PLC0415

        which = parse_which(logs)
        directory = _prepared(
            calling.Call(train_fn, args, kwargs),
            workers=workers,
            engine=_checked_engine(engine),
            name=name,
            max_restarts=max_restarts,
            checkpoints=os.fspath(checkpoints),
        )
        finish = _carried_out(directory, which)
        if finish.outcome != "done":
            raise _failure(directory, finish)
        status = directory.status
        if status is None:
            raise RunFailed(f"run {directory.name} is done, but its status cannot be read; see {directory.path}")
        place = _call_directory(directory)
        try:
            found = [calling.read_result(place, status.attempt, rank) for rank in range(status.world_size)]
        except RunFailed as error:
            raise RunFailed(f"run {directory.name} is done, but {error}\nlogs: {directory.path / 'logs'}") from error
        shutil.rmtree(place, ignore_errors=True)  # they are with who asked for them
        return found


def _checked_engine(name: str) -> Literal["local", "ray"]:
    """
    Raises:
        ConfigError: There is no such engine.
    """
    if name == "local":
        return "local"
    if name != "ray":
        raise ConfigError(f"engine={name!r} is not known; there are 'local' and 'ray'", field="engine")
    return "ray"


def _prepared(
    call: calling.Call,
    *,
    workers: int | str,
    engine: Literal["local", "ray"],
    name: str,
    max_restarts: int,
    checkpoints: str,
) -> RunDirectory:
    """The run's directory, with the function in it; or none at all."""
    from strata.launch.record import directory as run_directory  # noqa: PLC0415
    from strata.launch.spec import RunSpec, Size  # noqa: PLC0415

    chosen = name or run_directory.new_name(SystemClock())
    place = run_directory.root() / chosen
    spec = RunSpec(
        name=chosen,
        script=CALLED,
        arguments=(str(place / "call" / calling.FUNCTION),),
        is_module=True,
        workers=Size.parse(str(workers)),
        directory=str(Path.cwd()),
        checkpoints=run_directory.checkpoints_at(checkpoints, place),
        max_restarts=max_restarts,
        engine=engine,
        preload=("cloudpickle", *_imports_of(call.function)),
        function=call.name,
    )
    if engine == "ray":
        from strata.launch.nodes.ray_cluster import check  # noqa: PLC0415

        check(spec)
    directory = run_directory.create(spec)
    try:
        calling.write_call(_call_directory(directory) / calling.FUNCTION, call)
    except BaseException:
        shutil.rmtree(directory.path, ignore_errors=True)
        raise
    return directory


def _call_directory(directory: RunDirectory) -> Path:
    return directory.path / "call"


def _imports_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """What it will import, as far as its text says: that of the file that it is in, and its own lines. In a file, what
    other functions import does not count; in this one, it does.
    """
    from strata.launch.processes.imports import safe_imports  # noqa: PLC0415

    text = ""
    with contextlib.suppress(OSError, TypeError, ValueError):
        text = Path(inspect.getsourcefile(function) or "").read_text(encoding="utf-8")
    with contextlib.suppress(OSError, TypeError, SyntaxError, ValueError):
        match ast.parse(textwrap.dedent(inspect.getsource(function))).body:
            case [ast.FunctionDef(body=lines)]:
                text += "\n" + ast.unparse(ast.Module(lines, []))
    return safe_imports(text)


def _carried_out(directory: RunDirectory, logs: Which) -> Finish:
    """Where there is an event loop already, as in a notebook, in another thread: there can be one in each."""
    from strata.launch.record.view import display_for  # noqa: PLC0415
    from strata.launch.run import run  # noqa: PLC0415 - heavy, and only for this

    is_watched = sys.stderr is not None and sys.stderr.isatty()

    def work() -> Finish:
        display = display_for(sys.stderr, SystemClock(), quiet=not is_watched)
        try:
            return run(directory, display, logs=logs)
        finally:
            display.close()

    if not _is_in_loop():
        return work()
    with _interrupted_here(), ThreadPoolExecutor(1, thread_name_prefix="strata-run") as pool:
        future = pool.submit(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C, which reaches the main thread only
            _stop(directory, future)
            raise


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _interrupted_here() -> Iterator[None]:
    """Ctrl-C is an exception where the main thread waits. Under `asyncio.run` it would cancel the task that waits,
    which hears of that only when it does not wait any more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before is not None:  # it was not set by Python
            signal.signal(signal.SIGINT, before)


def _stop(directory: RunDirectory, future: Future[Finish]) -> None:
    """Until it has ended. The workers save first; after another Ctrl-C they do not."""
    is_asked = is_now = False
    while not future.done():
        try:
            is_asked = is_asked or _is_asked_to_stop(directory, is_now=is_now)
            wait([future], timeout=None if is_asked else STOP_AGAIN_S)
        except KeyboardInterrupt:
            is_asked, is_now = False, True


def _is_asked_to_stop(directory: RunDirectory, *, is_now: bool) -> bool:
    """Whether there was somebody to ask: a run that is asked twice stops at once."""
    from strata.launch import control  # noqa: PLC0415

    status = directory.status
    if status is None or not status.control:
        return False
    try:
        control.ask(status.control, control.Stop(is_now=is_now))
    except ConfigError:  # it is not there yet, or no longer
        return False
    return True


def _failure(directory: RunDirectory, finish: Finish) -> BaseException:
    """The cause first, then the worker's own words, then where to look."""
    from strata.launch.record.log import NUM_LAST_LINES, last_lines  # noqa: PLC0415

    if finish.outcome == "stopped" and finish.reason.startswith("Ctrl-C"):
        return KeyboardInterrupt(f"run {directory.name}: {finish.reason}")
    lines = [f"run {directory.name} {finish.outcome}: {finish.reason}"]
    log = directory.first_failure() if finish.outcome == "failed" else None
    if log is not None:
        said = calling.read_error(_call_directory(directory), log.attempt, log.rank)
        lines += [f"rank {log.rank} said:", said or "\n".join(last_lines(log.path, NUM_LAST_LINES))]
    lines += [f"logs: {directory.path / 'logs'}"]
    return RunFailed("\n".join(lines))
