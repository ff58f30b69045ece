"""`TrainingOrchestrator`: a worker's calls to the coordinator and its checkpoints in one object; and a way to run a
function on workers.

    orchestrator = TrainingOrchestrator("localhost:50051")
    orchestrator.register_worker("worker-01")
    orchestrator.register_dataset("images", total_samples=1_281_167, shard_size=10_000)
    while (shard := orchestrator.get_shard("images")) is not None:
        …
        orchestrator.heartbeat(step=step, loss=loss)
        orchestrator.ack_shards([shard])
    orchestrator.barrier("epoch-0", step=step)

    results = TrainingOrchestrator().run(train, 1e-3, workers=4)

It connects, or starts its own coordinator, when a call first needs that.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any, Self

from strata.coordinator.state.job import DEFAULT_JOB
from strata.errors import ConfigError, StaleIncarnation, UnknownWorker
from strata.lifecycle import Home
from strata.train import function as remote_function
from strata.train.function_run import check_engine, preload_of, run_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from strata.checkpoint import CheckpointManager, CheckpointMetadata, Save
    from strata.coordinator.client import ClientConfig, CoordinatorClient, Worker
    from strata.coordinator.embedded import EmbeddedCoordinator
    from strata.coordinator.state.events import CommandRecord, ShardEntry
    from strata.coordinator.state.shards import Shard
    from strata.coordinator.state.views import Progress
    from strata.launch.run import PageOf
    from strata.tune.callbacks import StudyCallback
    from strata.tune.space import SearchSpace
    from strata.tune.study import Study

__all__ = ["TrainingOrchestrator", "page_opener", "preload_of"]

SESSION_TIMEOUT_S = 300.0
"""Time for all workers to reach their first save."""
MAX_DRAWN = 16
"""Workers whose random numbers form the name of a session."""


class TrainingOrchestrator:
    """The API for one worker of a job. Each worker process creates one."""

    def __init__(
        self,
        coordinator_url: str | None = None,
        *,
        job_id: str = DEFAULT_JOB,
        checkpoints: str | os.PathLike[str] = "checkpoints",
        config: ClientConfig | None = None,
        hpt_mode: Any = "random",
        **checkpoint_options: Any,
    ) -> None:
        """
        Args:
            coordinator_url: Address of the coordinator; default: start one inside this process.
            checkpoints: Directory or URL for `save` and `restore`.
            hpt_mode: How `tune` searches: "random", "grid", "sobol", "bayesian", "tpe", "cmaes", "nsga2", "hyperband",
                "asha", "median", "bohb", "pbt"; a sampler or a pruner object of Optuna; or a pair of a sampler and a
                scheduler, such as `("tpe", "asha")`.
            checkpoint_options: Arguments for `CheckpointManager`: `keep_count`, `compression`, `storage_options`, …
        """
        self.job_id = job_id
        self._url = coordinator_url
        self._config = config
        self._place = checkpoints
        self._checkpoint_options = checkpoint_options
        self._hpt_mode = hpt_mode
        self._client: CoordinatorClient | None = None
        self._embedded: EmbeddedCoordinator | None = None
        self._worker: Worker | None = None
        self._manager: CheckpointManager | None = None
        self._manager_generation = 0
        self._home = Home()

    def connect(self) -> Self:
        """Connect now. Other calls connect automatically.

        Raises:
            CoordinatorUnavailable: The coordinator does not answer.
        """
        self._connected()
        return self

    def close(self) -> None:
        """Wait for the last save, leave the job and disconnect. Does nothing in a forked child."""
        if not self._home.is_here:
            return
        try:
            if self._manager is not None:
                self._manager.close()
        finally:
            self._manager = None
            try:
                if self._worker is not None and self._worker.lost is None:
                    self.deregister("closed")
            finally:
                self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> CoordinatorClient:
        if self._client is None:
            from strata.coordinator.client import CoordinatorClient  # noqa: PLC0415 - imports gRPC

            url = self._url
            if url is None:
                from strata.coordinator.embedded import EmbeddedCoordinator  # noqa: PLC0415

                self._embedded = EmbeddedCoordinator().start()
                url = self._embedded.address
            try:
                self._client = CoordinatorClient(url, config=self._config)
                self._client.connect()
            except BaseException:
                self._disconnect()
                raise
        return self._client

    def _disconnect(self) -> None:
        client, self._client, self._worker = self._client, None, None
        embedded, self._embedded = self._embedded, None
        if client is not None:
            client.close()
        if embedded is not None:
            embedded.stop()

    # -- the worker ------------------------------------------------------------------------------------------------

    def register_worker(self, worker_id: str, *, capacity: float = 1.0) -> Worker:
        """Join the job; return a worker with `rank` and `world_size`. Heartbeats are sent in the background."""
        self._worker = self._connected().register_worker(worker_id, job_id=self.job_id, capacity=capacity)
        self._worker.report(session=float(secrets.randbits(52)))
        return self._worker

    @property
    def worker(self) -> Worker:
        """
        Raises:
            UnknownWorker: No worker is registered.
            StaleIncarnation: The coordinator has removed it.
        """
        if self._worker is None:
            raise UnknownWorker("no worker is registered here; call register_worker(worker_id) first")
        if self._worker.lost is not None:
            raise StaleIncarnation(
                f"worker {self._worker.worker_id!r} was lost ({self._worker.lost}); register it again"
            )
        return self._worker

    def heartbeat(self, step: int | None = None, epoch: int | None = None, **metrics: float) -> list[CommandRecord]:
        """Report progress now; return the commands that have come, such as STOP."""
        worker = self.worker
        worker.report(state="TRAINING" if step is not None else None, step=step, epoch=epoch, **metrics)
        worker.heartbeat()
        return worker.take_commands()

    def barrier(
        self, barrier_id: str, step: int | None = None, *, timeout_s: float = 300.0, elastic: bool = True
    ) -> None:
        """Wait until all workers of the job have arrived. `elastic`: continue after a change of the members; otherwise
        the change breaks the barrier.

        Raises:
            BarrierBroken: A worker does not arrive; the message names it and the reason.
        """
        self.worker.barrier(barrier_id, step=step, timeout_s=timeout_s, elastic=elastic)

    def deregister(self, reason: str = "") -> None:
        """Leave the job; the worker's shards move to the others at once."""
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
        """Register a dataset, by count or by list; return its number of shards. A second call changes nothing."""
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
        """Return this worker's unfinished shards, in the order in which to read them."""
        return self.worker.shards(dataset_id, epoch=epoch)

    def get_shard(self, dataset_id: str | None = None, epoch: int | None = None) -> Shard | None:
        """Return this worker's next shard, or None if it has none left."""
        return next(iter(self.get_shards(dataset_id, epoch)), None)

    def ack_shards(self, shards: Sequence[Shard]) -> Progress:
        """Acknowledge shards that were trained on: no worker gets them again in this epoch."""
        return self.worker.ack(shards)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, state: Any, *, step: int, epoch: int = 0, **arguments: Any) -> Save:
        """Save as `CheckpointManager.save` does. The workers of a job save one checkpoint together, so all of them must
        call it. The coordinator records it.
        """
        return self._checkpoints().save(state, step=step, epoch=epoch, **arguments)

    def restore(self, into: Mapping[str, Any], *, step: int | None = None, strict: bool = True) -> CheckpointMetadata:
        """Load the last checkpoint, or that of a step, into modules and optimizers; call it on all workers.

        Raises:
            NoCheckpoint: No checkpoint exists.
        """
        return self._checkpoints().restore(into, step=step, strict=strict)

    def load(self, *, step: int | None = None) -> Any:
        """Return the saved state; call it on all workers.

        Raises:
            NoCheckpoint: No checkpoint exists.
        """
        return self._checkpoints().load(step=step)

    def _checkpoints(self) -> CheckpointManager:
        """Return the manager for the current generation, which determines ranks and world size."""
        worker = self._worker
        generation = worker.latest_generation if worker is not None else 0
        if self._manager is None or generation != self._manager_generation:
            from strata.checkpoint import CheckpointManager, Ranks  # noqa: PLC0415 - only for saves
            from strata.launch.commit import CoordinatorCommit  # noqa: PLC0415

            if self._manager is not None:
                self._manager.close()
                self._manager = None
            ranks = commit = None
            if worker is not None:
                session = self._agree_on_session(worker)
                ranks = Ranks(rank=worker.rank, size=worker.world_size, session=session)
                commit = CoordinatorCommit(worker)
                generation = worker.generation
            self._manager = CheckpointManager(self._place, ranks=ranks, commit=commit, **self._checkpoint_options)
            self._manager_generation = generation
        return self._manager

    def _agree_on_session(self, worker: Worker) -> str:
        """Return a new session name, the same on all workers: it joins a random number of each."""
        worker.heartbeat()
        while True:  # once, unless the members change between the two calls
            worker.barrier("strata/session", timeout_s=SESSION_TIMEOUT_S, elastic=True)
            found = self._connected().list_workers(job_id=self.job_id)
            if found.generation == worker.generation:
                drawn = (f"{each.metrics.get('session', 0.0):.0f}" for each in found.workers[:MAX_DRAWN])
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
        dashboard: bool | str = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `train_fn(*args, **kwargs)` on workers, as `strata run` runs a script; return the results in the order
        of the ranks.

        In the function, `strata.init()` returns the worker's context, with its rank and checkpoints. When a worker
        dies, all restart from the last checkpoint, if there is one. `strata ps`, `logs` and `stop` work with the run.
        It can be called from any thread. Ctrl-C lets the workers save first, a second Ctrl-C kills them.

        Args:
            workers: Number of workers; "2:8" for a run that may shrink and grow.
            engine: Where to start them: "local" on this machine; "ray" on the cluster that RAY_ADDRESS names, or on a
                new one. Several machines must share the directory of runs (STRATA_RUNS_DIR).
            name: Name of the run; default: a generated one.
            max_restarts: Number of failures that the run may survive.
            checkpoints: Directory or URL for `strata.init()`; default: in the run's directory.
            logs: Whose output to print: "rank0", "all" or "none". "auto" is rank 0.
            dashboard: Serve the page of the run while it runs, and print its address; "127.0.0.1:8000" for a certain
                port. Not for a Ray cluster of other machines.

        Raises:
            ConfigError: A setting is invalid; the message names the cure.
            InvalidArgument: The function or an argument cannot be pickled.
            RunFailed: The function raised, or a worker died too often; the message shows its traceback.
        """
        return run_call(
            remote_function.Call(train_fn, args, kwargs),
            workers=workers,
            engine=engine,
            name=name,
            max_restarts=max_restarts,
            checkpoints=os.fspath(checkpoints),
            logs=logs,
            page_of=page_opener(dashboard),
        )

    def tune(
        self,
        train_fn: Callable[..., Any],
        *,
        space: SearchSpace,
        num_trials: int = 100,
        metric: str | Sequence[str] = "loss",
        mode: str | Sequence[str] = "min",
        workers: int = 2,
        workers_per_trial: int = 1,
        max_workers_per_trial: int | None = None,
        engine: str = "local",
        nnodes: int = 1,
        timeout: float | None = None,
        report_timeout: float | None = None,
        max_failures: int = 3,
        name: str = "",
        seed: int = 0,
        constraints: Sequence[str] = (),
        warm_start: Sequence[Study | str | os.PathLike[str]] = (),
        callbacks: Sequence[StudyCallback] = (),
        options: Mapping[str, Any] | None = None,
        quiet: bool = False,
        dashboard: bool | str = False,
    ) -> Study:
        """Call `train_fn(config)` or `train_fn(config, trial)` with many configurations; return the study.

        The function reports its objective with `strata.init().report(step=, loss=)` or `trial.report(step=, loss=)`,
        and may return the final value. Each call is a process of its own, or several with `workers_per_trial`. A trial
        that is killed resumes from its last checkpoint, and so does one that the mode pauses and promotes, if the
        function saves with `ctx.maybe_checkpoint`. With the name of a study that exists, the study continues.

        Args:
            space: The configurations to search.
            metric: Name of the objective in reports; several for several objectives.
            mode: "min" or "max", one per objective.
            workers: Number of trials that run at the same time.
            workers_per_trial: Number of processes that train one configuration together, each with its rank.
            max_workers_per_trial: Once no other trial needs them, free workers are given to the most promising trial,
                up to this number: it saves, and continues from its checkpoint on more workers. For functions that
                train data-parallel on any number of workers. Default: none are.
            engine: Where trials run: "local" on this machine, "ray" on the cluster that RAY_ADDRESS names, or on a new
                one.
            nnodes: Number of machines. Call `tune` on each of them, with the same name and the address of a
                coordinator. Several machines must share the directory of runs (STRATA_RUNS_DIR).
            timeout: Seconds after which running trials save and stop. The study can be continued.
            report_timeout: Longest time in seconds that a trial may run without a report of its objective. Then it is
                killed, which counts as a failure. Default: no limit.
            max_failures: Failures of a trial, without progress between them, after which it is given up.
            name: Name of the study; default: a generated one.
            seed: The same seed and one worker give the same trials.
            constraints: Limits of metrics that trials report, such as "memory_gb <= 16". A trial that violates one at
                its end cannot be the best.
            warm_start: Studies, or their names or directories, whose finished trials the sampler learns from before it
                chooses. A study that is continued keeps those that it began with.
            callbacks: Objects to call when a trial starts, reports or ends: see `strata.tune.callbacks.StudyCallback`.
            options: Options of the mode, such as `{"kind": "stop"}` for "asha".
            quiet: Show neither the live table nor, where stderr is not a terminal, a line per event.
            dashboard: Serve the page of the study while it runs, and print its address; "127.0.0.1:8000" for a certain
                port. Not with a coordinator of its own or a Ray cluster of other machines; `strata dashboard NAME`
                shows any study.

        Raises:
            ConfigError: A setting is invalid; the message names the cure.
            InvalidArgument: The function cannot be pickled.
            RunFailed: All of the first trials failed; the message has the cause.
        """
        from strata.tune.call import tune  # noqa: PLC0415 - a higher layer, which imports this one

        if self._url and dashboard not in (False, "off"):
            raise ConfigError(
                f"dashboard={dashboard!r} needs the coordinator inside this process, but {self._url} was passed; leave "
                "it out, and open the page of that coordinator, or `strata dashboard NAME` on this machine",
                field="dashboard",
            )
        metrics = [metric] if isinstance(metric, str) else list(metric)
        directions = [mode] * len(metrics) if isinstance(mode, str) else list(mode)
        for direction in directions:
            if direction not in ("min", "max"):
                raise ConfigError(f"mode={direction!r} is unknown; use 'min' or 'max'", field="mode")
        return tune(
            train_fn,
            space=space,
            mode=self._hpt_mode,
            options=options or {},
            num_trials=num_trials,
            metrics=metrics,
            directions=directions,
            workers=workers,
            workers_per_trial=workers_per_trial,
            max_workers_per_trial=max_workers_per_trial,
            engine=check_engine(engine),
            nnodes=nnodes,
            coordinator=self._url or "",
            timeout_s=timeout,
            report_timeout_s=report_timeout,
            max_failures=max_failures,
            name=name,
            seed=seed,
            constraints=[constraints] if isinstance(constraints, str) else constraints,
            warm_start=warm_start,
            callbacks=callbacks,
            quiet=quiet,
            page_of=page_opener(dashboard, quiet=quiet, is_study=True),
        )


def page_opener(dashboard: bool | str, *, quiet: bool = False, is_study: bool = False) -> PageOf | None:
    """Return what opens the page of a run, or of a study; None without one, and then nothing is imported.

    Raises:
        ConfigError: It is not an address of this machine's loopback.
    """
    if dashboard is False:
        return None
    from strata.dashboard.page import opener  # noqa: PLC0415 - a higher layer, which imports this one

    return opener(dashboard, quiet=quiet, is_study=is_study)
