"""`Trainer`: distributed training of a plain `nn.Module`.

    trainer = Trainer(module=model, loss=nn.BCEWithLogitsLoss(), optimizer=torch.optim.Adam, metrics=["auc"], workers=2)
    result = trainer.fit("data/train/", label="clicked", valid="data/valid/", epochs=2, batch_size=4096)
    trainer.evaluate("data/test/")

A Trainer holds arguments and the module, and no process: `fit` describes the work, and an engine runs it.
"""

from __future__ import annotations

import copy
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from strata.checkpoint import CheckpointManager
from strata.errors import InvalidArgument, LimitExceeded
from strata.scratch import Scratch
from strata.storage.memory import MemoryStore
from strata.train.orchestrator import page_opener
from strata.train.startup import check_options, strategy_of
from strata.trainer import engine as engines
from strata.trainer import places, sources, work
from strata.trainer.assembly import check
from strata.trainer.callbacks import listed as listed_callbacks
from strata.trainer.config import DEFAULT_BATCH_SIZE, FitConfig, Settings, check_idle_timeout, column_names, mapping
from strata.trainer.diagnosis import explain_unpicklable
from strata.trainer.history import EarlyStopping, Result
from strata.trainer.objective import Objective
from strata.trainer.strategy import AllReduce, ServerStrategy, is_asynchronous, num_servers, torch_rec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from strata.train.context import Context
    from strata.trainer.batches import Batch
    from strata.trainer.callbacks import Callback
    from strata.trainer.config import Every, Label, OnNan, Precision
    from strata.trainer.engine import Engine
    from strata.trainer.features import Features
    from strata.trainer.history import Better
    from strata.trainer.strategy import Strategy
    from strata.trainer.tuning import Tuning
    from strata.tune.space import SearchSpace
    from strata.tune.study import Study


SCRATCH = "strata-trainer-"
"""Prefix of temporary directories, which hold tables; the next Trainer removes those of a killed process."""
STREAM_EVERY = "1m"
"""When a stream saves, by default."""
STREAM_OPTIONS: Mapping[str, Any] = {"incremental_depth": 16}
"""Options of a stream's checkpoints: one contains what has changed since the one before, not since the first."""
EXPORT_ROWS = 4
"""Rows of the batch with which a program is captured; one row would look like a constant."""
_SET_ELSEWHERE = {
    "checkpoints": "Trainer(checkpoints=…)",
    "storage_path": "Trainer(checkpoints=…)",
    "every": "fit(every=…)",
    "strategy": "fit(every=…)",
    "ranks": "Trainer(workers=…)",
    "commit": "Trainer(workers=…)",
}
"""Options of checkpoints that another argument determines."""
_OF_A_PLACE = ("bucket", "storage_type", "storage_options", "store")
"""Options of checkpoints that are checked where a fit opens their directory or URL."""


class Trainer:
    """Trains, evaluates and exports one module. Override `training_step` to compute the loss in another way."""

    def __init__(
        self,
        module: nn.Module | Callable[..., nn.Module],
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: Any = "adam",
        metrics: Sequence[Any] | Mapping[str, Any] = (),
        *,
        strategy: Strategy | ServerStrategy | None = None,
        workers: int | str = 1,
        engine: str = "local",
        features: Features | None = None,
        optimizer_args: Mapping[str, Any] | None = None,
        callbacks: str | Callback | Sequence[str | Callback] = (),
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_options: Mapping[str, Any] | None = None,
        name: str = "",
        max_restarts: int = 3,
        logs: str = "auto",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: Precision = "fp32",
        compile: bool | Mapping[str, Any] = False,  # noqa: A002 - as torch calls it
        ema: float | None = None,
        scheduler: Callable[..., Any] | None = None,
        scheduler_every: Every = "epoch",
        class_weights: Mapping[int, float] | None = None,
        on_nan: OnNan = "raise",
        seed: int = 0,
        deterministic: bool = False,
        log_every: int = 10,
        dashboard: bool | str = False,
    ) -> None:
        """
        Args:
            module: The module; or a function of `features.fields` that returns it, such as a model class.
            loss: Called with predictions and targets; without it, the module returns its loss.
            optimizer: A class, an instance, a function of the parameters, a name, or an `OptimizerStack`.
            metrics: Names such as "auc", metric objects of ours or of torchmetrics, or functions over all rows.
            strategy: How workers combine their gradients, by default `AllReduce()`; `Hybrid()` and `ParameterServer()`
                start parameter servers beside the workers.
            workers: Number of workers, or "2:8" for a run that may shrink and grow. Under `strata run` and torchrun,
                the launcher determines it.
            engine: "local" or "ray".
            features: Fitted feature columns, which encode files and tables.
            optimizer_args: Keyword arguments for the optimizer, unless it is an instance or a stack.
            callbacks: "json", "tensorboard", "progress", or `Callback` objects; one or several.
            checkpoints: Directory or URL; by default a new directory below `checkpoints/`.
            checkpoint_options: Arguments for `CheckpointManager`, such as `keep_count` and `storage_options`.
            name: Name of the run for `strata ps` and `strata logs`.
            max_restarts: Number of failures that a run of several workers may survive.
            logs: Whose output to print with several workers: "rank0", "all" or "none". "auto" is rank 0.
            accumulate: Batches per optimizer step.
            clip_norm: Largest norm of all gradients together.
            clip_value: Largest absolute value of a gradient.
            precision: "fp32", or automatic mixed precision with "bf16" or "fp16".
            compile: Compile the module: True, or arguments for `torch.compile`.
            ema: Decay of an exponential moving average of the weights, which evaluation and the result use.
            scheduler: A function of the optimizer that returns a learning rate scheduler.
            scheduler_every: Whether the scheduler advances every "epoch" or every "step".
            class_weights: Weights of the loss by class, such as {0: 1.0, 1: 4.0}.
            on_nan: What to do if the loss or a gradient is not finite: "raise", "skip" the step, or "stop" training.
                "raise" checks the loss of every step, and the weights before they are saved.
            seed: Determines the order of rows and the random numbers of training.
            deterministic: Use deterministic algorithms only.
            log_every: Steps between two reports of the loss.
            dashboard: Serve the page of each `fit` and `tune` while it runs, and print its address; "127.0.0.1:8000"
                for a certain port. One worker trains in a process of its own then. Under `strata run` and torchrun, and
                on a Ray cluster of other machines, it has no effect.

        Raises:
            InvalidArgument, ConfigError: An argument is invalid; the message names the cure.
        """
        self.settings = Settings(
            accumulate=accumulate,
            clip_norm=clip_norm,
            clip_value=clip_value,
            precision=precision,
            compile=compile,
            ema=ema,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            class_weights=class_weights,
            on_nan=on_nan,
            seed=seed,
            deterministic=deterministic,
            log_every=log_every,
        )
        if features is not None and not hasattr(features, "fields"):
            raise InvalidArgument(
                f"features= is a {type(features).__name__}; pass Features.fit(data, [SparseFeat(…), DenseFeat(…)])",
                field="features",
            )
        is_strategy = isinstance(strategy, ServerStrategy) or (
            hasattr(strategy, "bind") and not isinstance(strategy, type)
        )
        if strategy is not None and not is_strategy:
            raise InvalidArgument(
                f"strategy={strategy!r} is not a strategy; pass AllReduce(…), Hybrid(…) or ParameterServer(…)",
                field="strategy",
            )
        if checkpoints is not None and not isinstance(checkpoints, str | os.PathLike):
            raise InvalidArgument(f"checkpoints={checkpoints!r} is not a directory or URL", field="checkpoints")
        self.features = features
        self.module = _module(module, features)
        self._make_module = None if isinstance(module, nn.Module) else module
        self.loss = loss
        self.objective = Objective(loss, class_weights=self.settings.class_weights)
        self.optimizer = optimizer
        self.optimizer_args = mapping("optimizer_args", optimizer_args)
        self.metrics = metrics
        self.strategy: Strategy | ServerStrategy = AllReduce() if strategy is None else strategy
        self.workers = workers
        self.engine = engine
        self.callbacks = listed_callbacks(callbacks)
        self.checkpoints = checkpoints
        self.checkpoint_options = _checkpoint_options(checkpoint_options)
        self.name = name
        self.max_restarts = max_restarts
        self.logs = logs
        self.dashboard = dashboard
        self.context: Context | None = None
        """During a fit on this rank: its step, rank and attempt, for a `training_step` of yours."""
        self.result: Result | None = None
        """Of the last fit."""
        self._last_fit: FitConfig | None = None
        self._last_data: Any = None
        self._engine(has_page=True)  # refuses invalid arguments of any engine now

    # -- what users override ---------------------------------------------------------------------------------------

    def training_step(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch: a mean over its rows. `module` may be wrapped by the strategy."""
        loss: torch.Tensor = self.objective(batch.call(module), batch.target, batch.weight)
        return loss

    def prediction_step(self, module: nn.Module, batch: Batch) -> Any:
        """Return the predictions for a batch, which the loss and the metrics receive."""
        return batch.call(module)

    @property
    def has_own_step(self) -> bool:
        """Whether a subclass computes the loss, which an evaluation therefore does not know."""
        return type(self).training_step is not Trainer.training_step

    # -- what users call -------------------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        *,
        label: Label = None,
        valid: Any = None,
        epochs: int = 1,
        batch_size: int | None = None,
        inputs: str | Sequence[str] | None = None,
        weight: str | None = None,
        shuffle: bool | None = None,
        max_steps: int | None = None,
        early_stopping: EarlyStopping | int | None = None,
        monitor: str = "",
        restore_best: bool | None = None,
        resume: bool = False,
        every: Any = None,
        stream: bool = False,
        idle_timeout_s: float | None = None,
        **data_options: Any,
    ) -> Result:
        """Train; afterwards `trainer.module` holds the trained weights.

        Args:
            data: A path or URL (Parquet, ORC, CSV, JSON, Arrow), a map-style Dataset, a loader, a pandas or Arrow
                table, tensors, or a dict of tensors.
            label: Column of the target, several columns, or a function of the batch. With (inputs, target) pairs it
                is not needed.
            valid: Data to evaluate on after each epoch.
            epochs: Passes over the data, including those before a resume.
            batch_size: Rows per batch on each worker; by default 1,024. A loader has its own.
            inputs: Columns for the module. By default, its `forward` decides: parameters named like columns receive
                them, and a single other parameter receives the whole batch.
            weight: Column with the weights of the rows.
            shuffle: Read the rows in a new random order in each epoch; by default yes. A loader has its own order.
            max_steps: Optimizer steps after which training ends, even in the middle of an epoch.
            early_stopping: Epochs without an improvement after which training stops, or an `EarlyStopping`.
            monitor: Key of the history that decides which epoch is the best; by default the first validation metric.
            restore_best: End with the weights of the best epoch; by default with early stopping.
            resume: Continue the last fit with the same `checkpoints`, with any number of workers.
            every: When to save: a number of steps, a time such as "10m", or a strategy. A stream saves every minute by
                default.
            stream: Train on files as they are added to the directory `data`, each of them once, until the run is
                stopped, `max_steps` is reached, or no file arrives for `idle_timeout_s`.
            idle_timeout_s: Seconds without a new file after which a stream ends; by default it does not.
            data_options: Arguments for the loader, such as `filters`, `num_workers` and `storage_options`.

        Raises:
            InvalidArgument, ConfigError: An argument does not fit; most are found before workers start.
            RunFailed: A worker failed too often; the message shows its traceback.
        """
        if restore_best is not None and not isinstance(restore_best, bool):
            raise InvalidArgument(f"restore_best={restore_best!r} must be True, False or None", field="restore_best")
        strategy_of(every)  # refuses what it does not know
        if stream:
            check_idle_timeout(idle_timeout_s)
            data = sources.resolve_stream(data, data_options, idle_timeout_s=idle_timeout_s)
        elif idle_timeout_s is not None:
            raise InvalidArgument("idle_timeout_s= is for streams; add stream=True, or leave it out", field="stream")
        engine = self._engine(has_page=True)
        with Scratch(SCRATCH) as scratch, engine.prepared():
            config, watched, better = self._checked(
                data if stream else self._resolve(data, scratch),
                scratch,
                label=label,
                valid=valid,
                epochs=epochs,
                batch_size=batch_size,
                inputs=inputs,
                weight=weight,
                shuffle=shuffle,
                max_steps=max_steps,
                early_stopping=early_stopping,
                monitor=monitor,
                resume=resume,
                **data_options,
            )
            best_options = {"keep_best": (watched, "max" if better == "higher" else "min")} if valid is not None else {}
            place = places.choose(
                self.checkpoints,
                resume=resume,
                is_worker=engines.is_worker(),
                storage_options=self.checkpoint_options.get("storage_options"),
            )
            options = {**best_options, **(STREAM_OPTIONS if stream else {}), **self.checkpoint_options}
            if stream and every is None and engines.agrees_on_times():
                every = STREAM_EVERY
            saving = engines.Saving(checkpoints=place, every=every, options=options)
            if stream:  # an export from another thread needs them while this one trains
                self._remember(config, data.sample)
            result: Result = self._run(engine, work.fit, config, saving)
        wants_best = early_stopping is not None if restore_best is None else restore_best
        self.result = result
        self._remember(config, data.sample if stream else data)
        best = result.best if wants_best else None
        work.load_weights(self, result.checkpoints, chosen=None if best is None else best.id)
        return result

    def tune(
        self,
        space: SearchSpace,
        data: Any,
        *,
        metric: str = "",
        mode: str | None = None,
        num_trials: int = 100,
        hpt_mode: object = "hyperband",
        workers: int = 2,
        max_workers_per_trial: int | None = None,
        module: Callable[..., nn.Module] | None = None,
        timeout: float | None = None,
        max_failures: int = 3,
        name: str = "",
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        **fit_arguments: Any,
    ) -> Study:
        """Fit many configurations and return the study; afterwards this Trainer has the best one, and its weights.

        A parameter of the space sets the argument of the same name: `batch_size`, `epochs` and `max_steps` of `fit`;
        `accumulate`, `clip_norm`, `clip_value`, `ema` and `precision` of the Trainer; those of the optimizer, such as
        `lr`; those of the function that builds the module; and the weights of a `LossFnStack`, by their names.

        Each trial is a fit in a process of its own, and reports after each epoch. One that is killed, or that the mode
        pauses and promotes, continues from its checkpoint.

        Args:
            space: The configurations to search.
            data: What to train on, as in `fit`.
            metric: Key of the history to optimize, such as "auc"; by default the first metric of `valid=`.
            mode: "min" or "max"; by default what is better for the metric.
            num_trials: Number of configurations.
            hpt_mode: How to search; see `TrainingOrchestrator`.
            workers: Number of trials that run at the same time.
            max_workers_per_trial: Once no other trial needs them, free workers are given to the most promising trial,
                up to this number: it saves, and continues from its checkpoint data-parallel, at the exact row.
                `batch_size` is per worker, so its steps then average over more rows. Default: none are.
            module: A function that builds the module from parameters of the space, after `features.fields` if the
                Trainer has features. By default the function that the Trainer was created with, if it was.
            timeout: Seconds after which running trials save and stop. The study can be continued.
            max_failures: Failures of a trial, without progress between them, after which it is given up.
            name: Name of the study; a study that exists continues.
            seed: The same seed and one worker give the same trials.
            options: Options of the mode, such as `{"kind": "stop"}` for "asha". Their steps are epochs.
            fit_arguments: Other arguments of `fit`, such as `label`, `valid` and `epochs`.

        Raises:
            InvalidArgument, ConfigError: A parameter or an argument does not fit; most are found before the first
                trial.
            RunFailed: All of the first trials failed; the message has the cause.
        """
        from strata.trainer.tuning import Tuning  # noqa: PLC0415 - rarely needed

        tuning = Tuning.of(
            self._described(),
            space,
            data,
            fit_arguments,
            factory=self._make_module if module is None else module,
        )
        key, better = self._check_trial(tuning, space.draw(np.random.default_rng(seed)), metric)
        study = tuning.run(
            space,
            key=key,
            mode=mode if mode is not None else ("max" if better == "higher" else "min"),
            hpt_mode=hpt_mode,
            num_trials=num_trials,
            workers=workers,
            max_workers_per_trial=max_workers_per_trial,
            timeout=timeout,
            max_failures=max_failures,
            name=name,
            seed=seed,
            options=options,
            dashboard=self.dashboard,
        )
        if any(each.state == "finished" for each in study.trials):
            self._adopt(tuning, study)
        return study

    def evaluate(
        self,
        data: Any,
        *,
        label: Label = None,
        inputs: str | Sequence[str] | None = None,
        weight: str | None = None,
        batch_size: int | None = None,
        **data_options: Any,
    ) -> dict[str, float]:
        """Return the loss and the metrics over all rows.

        The arguments are those of `fit`, and default to those of the last fit. Rows count equally if the data has no
        column of weights.
        """
        # After a fit the module has all rows, so that an evaluation needs no servers. Under a launcher they exist.
        engine = self._engine(has_servers=engines.is_worker())
        with Scratch(SCRATCH) as scratch, engine.prepared():
            source = self._resolve(data, scratch)
            sources.check_loader(source, batch_size=batch_size, shuffle=None)
            config = self._config_for(source, label, batch_size, data_options, inputs=inputs)
            if weight is not None:
                self.objective.prepare_weights("weight")
                config = replace(config, weight=weight)
            elif config.weight not in (sources.column_names(source, config.data_options) or (config.weight,)):
                config = replace(config, weight=None)
            check(self, config)
            # A rank of a run keeps its context, and with it the place of checkpoints, for later fits.
            place = (
                places.choose(self.checkpoints, resume=True, is_worker=True)
                if engines.is_worker()
                else str(scratch.path)
            )
            saving = engines.Saving(checkpoints=place, options=self.checkpoint_options)
            found: dict[str, float] = self._run(engine, work.evaluate, config, saving)
            return found

    def predict(
        self,
        data: Any,
        *,
        inputs: str | Sequence[str] | None = None,
        batch_size: int | None = None,
        **data_options: Any,
    ) -> Any:
        """Return the module's predictions for all rows, in their order: a tensor, or the tuple or dict that it returns.

        Runs in this process.
        """
        with Scratch(SCRATCH) as scratch:
            source = self._resolve(data, scratch)
            sources.check_loader(source, batch_size=batch_size, shuffle=None)
            return work.predict(self, self._config_for(source, None, batch_size, data_options, inputs=inputs))

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        sample: Any = None,
        onnx: bool = False,
        checkpoints: str | os.PathLike[str] | None = None,
    ) -> Path:
        """Write the module, its features and a program, predict.py, that needs only torch; return the directory.

        Args:
            sample: Some rows in the form that `fit` takes; by default the data of the last fit.
            onnx: Also write `model.onnx`.
            checkpoints: Export the newest checkpoint of this directory or URL, and leave the module as it is. The fit
                that writes the checkpoints may be running, in another process or thread.

        Raises:
            InvalidArgument: The directory is not empty, or there was no fit and no sample.
            NoCheckpoint: `checkpoints` has none yet.
        """
        if checkpoints is not None:
            saved = copy.copy(self)
            saved.module, saved.optimizer, saved.objective = copy.deepcopy(
                (self.module, self.optimizer, self.objective)
            )
            work.load_newest_weights(saved, os.fspath(checkpoints))
            return saved.export(path, sample=sample, onnx=onnx)
        from strata.trainer.export import export  # noqa: PLC0415 - rarely needed

        data = self._last_data if sample is None else sample
        if data is None:
            raise InvalidArgument("export needs a sample of the input; pass sample= with some rows", field="sample")
        with Scratch(SCRATCH) as scratch:
            config = self._config_for(self._resolve(data, scratch), None, EXPORT_ROWS, {})
            batch, binding = work.example(self, config)
        directory = Path(path)
        export(directory, self.module, features=self.features, example=batch, binding=binding, onnx=onnx)
        return directory

    def _checked(
        self,
        train: Any,
        scratch: Scratch,
        *,
        label: Label = None,
        valid: Any = None,
        epochs: int = 1,
        batch_size: int | None = None,
        inputs: str | Sequence[str] | None = None,
        weight: str | None = None,
        shuffle: bool | None = None,
        max_steps: int | None = None,
        early_stopping: EarlyStopping | int | None = None,
        monitor: str = "",
        resume: bool = False,
        **data_options: Any,
    ) -> tuple[FitConfig, str, Better]:
        """Return the arguments of a fit on resolved data as they were checked, and what to monitor."""
        config = FitConfig(
            train=train,
            valid=None if valid is None else self._resolve(valid, scratch),
            label=_label(label),
            inputs=_inputs(inputs),
            weight=weight,
            epochs=epochs,
            max_steps=max_steps,
            batch_size=DEFAULT_BATCH_SIZE if batch_size is None else batch_size,
            shuffle=True if shuffle is None else shuffle,
            early_stopping=_early_stopping(early_stopping),
            monitor=monitor,
            data_options=data_options,
            is_resumed=resume,
            started_s=time.time(),
        )
        sources.check_loader(train, batch_size=batch_size, shuffle=shuffle)
        sources.check_batch_size(batch_size, data_options)
        if weight is not None:
            self.objective.prepare_weights("weight")
        return config, *check(self, config)

    def _check_trial(self, tuning: Tuning, config: Mapping[str, Any], metric: str) -> tuple[str, Better]:
        """Check a configuration in this process; return the key of the history that decides, and its direction."""
        with Scratch(SCRATCH) as scratch:
            arguments = {**tuning.fit_arguments(config), "monitor": metric}
            arguments.pop("restore_best", None)
            tuned = tuning.trainer_for(config)
            checked, watched, better = tuned._checked(self._resolve(tuning.data, scratch), scratch, **arguments)
            self._remember(checked, tuning.data)
        return watched, better

    def _adopt(self, tuning: Tuning, study: Study) -> None:
        """Take over the arguments and the weights of the best trial."""
        config = study.best.config
        tuned = tuning.trainer_for(config)
        self.settings, self.optimizer, self.optimizer_args = tuned.settings, tuned.optimizer, tuned.optimizer_args
        self.loss, self.objective, self.module = tuned.loss, tuned.objective, tuned.module
        self._check_trial(tuning, config, "")  # its arguments are the defaults of what follows
        work.load_newest_weights(self, os.path.dirname(study.best_checkpoint))  # noqa: PTH120 - perhaps a URL

    def _config_for(
        self,
        data: Any,
        label: Label,
        batch_size: int | None,
        options: Mapping[str, Any],
        *,
        inputs: str | Sequence[str] | None = None,
    ) -> FitConfig:
        last = self._last_fit
        if last is None:
            return FitConfig(
                train=data,
                label=_label(label),
                inputs=_inputs(inputs),
                batch_size=DEFAULT_BATCH_SIZE if batch_size is None else batch_size,
                shuffle=False,
                data_options=options,
            )
        return replace(
            last,
            train=data,
            label=last.label if label is None else _label(label),
            inputs=last.inputs if inputs is None else _inputs(inputs),
            batch_size=last.batch_size if batch_size is None else batch_size,
            shuffle=False,
            early_stopping=None,
            monitor="",
            data_options={**sources.inherited_options(data, last.data_options), **options},
        )

    def _remember(self, config: FitConfig, data: Any) -> None:
        """Keep the arguments of a fit as defaults for what follows."""
        self._last_data = data
        self._last_fit = replace(
            config, train=None, valid=None, early_stopping=None, monitor="", num_inputs=self._num_inputs(config)
        )

    def _num_inputs(self, config: FitConfig) -> int | None:
        num_values = sources.num_values(config.train)
        is_last_target = config.label is None and self.objective.loss is not None
        return num_values - 1 if num_values is not None and is_last_target else None

    def _resolve(self, data: Any, scratch: Scratch) -> Any:
        return sources.resolve(data, has_features=self.features is not None, scratch=scratch.path)

    def _engine(self, *, has_servers: bool = True, has_page: bool = False) -> Engine:
        return engines.choose(
            workers=self.workers,
            engine=self.engine,
            name=self.name,
            max_restarts=self.max_restarts,
            logs=self.logs,
            servers=num_servers(self.strategy) if has_servers else 0,
            is_apart=has_servers and torch_rec_of(self.strategy) is not None,
            is_asynchronous=has_servers and is_asynchronous(self.strategy),
            page_of=page_opener(self.dashboard) if has_page else None,
        )

    def _run(self, engine: Engine, job: Callable[..., Any], config: FitConfig, saving: engines.Saving) -> Any:
        try:
            return engine.run(job, (self._described(), config), saving)
        except LimitExceeded:
            raise
        except InvalidArgument as error:
            if error.field != "train_fn":
                raise
            raise explain_unpicklable(self._described(), config) from error

    def _described(self) -> Trainer:
        """Return what workers receive: this object without the results of earlier fits."""
        described = copy.copy(self)
        described.result = described._last_fit = described._last_data = described._make_module = None
        return described


def _early_stopping(given: Any) -> EarlyStopping | None:
    if isinstance(given, bool) or not isinstance(given, int | EarlyStopping | None):
        raise InvalidArgument(
            f"early_stopping={given!r} is neither a number of epochs nor an EarlyStopping; write early_stopping=3",
            field="early_stopping",
        )
    return EarlyStopping(patience=given) if isinstance(given, int) else given


def _inputs(columns: Any) -> tuple[str, ...] | None:
    return None if columns is None else column_names("inputs", columns)


def _label(label: Any) -> Label:
    is_used_as_given = label is None or isinstance(label, str) or callable(label)
    return label if is_used_as_given else column_names("label", label)


def _checkpoint_options(given: Any) -> dict[str, Any]:
    options = mapping("checkpoint_options", given)
    check_options(options)
    for name, place in _SET_ELSEWHERE.items():
        if name in options:
            raise InvalidArgument(f"checkpoint_options= has {name!r}, which {place} sets", field="checkpoint_options")
    of_any_place = {name: value for name, value in options.items() if name not in _OF_A_PLACE}
    if of_any_place.get("saver") == "process":  # which a store in memory does not have
        del of_any_place["saver"]
    CheckpointManager(store=MemoryStore(), **of_any_place).close()  # refuses values that are invalid
    return options


def _module(module: Any, features: Features | None) -> nn.Module:
    if isinstance(module, nn.Module):
        return module
    if not callable(module):
        raise InvalidArgument(f"module={module!r} is not an nn.Module; pass an instance of your class", field="module")
    if features is None:
        name = getattr(module, "__name__", repr(module))
        raise InvalidArgument(
            f"module={name} is not an instance; pass {name}(…), or features= from which to build it", field="module"
        )
    built = module(features.fields)
    if not isinstance(built, nn.Module):
        raise InvalidArgument(
            f"module= returned a {type(built).__name__} for the fields of features=; it must return an nn.Module",
            field="module",
        )
    return built
