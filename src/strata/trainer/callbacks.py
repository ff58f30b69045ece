"""Callbacks: what a fit reports while it runs. They run on rank 0, between steps, in the order of the user's list.

Callbacks are not part of checkpoints. After a restart, `on_start` receives the step and the history of the checkpoint,
so that a logger replaces what it wrote later: the steps after the checkpoint are made and reported again.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.errors import InvalidArgument
from strata.train.loggers import open_writer, summary_writer

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from rich.progress import Progress

    from strata.trainer.history import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is known when training starts or resumes."""

    epochs: int | None
    """None for a stream, which has no last one."""
    steps_per_epoch: int | None
    """None if the loader does not know its length."""
    step: int
    """0, or the step of the checkpoint that the run resumes from."""
    history: Sequence[Mapping[str, float]]
    """The rows of the epochs up to that step."""
    world_size: int
    checkpoints: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    step: int
    epoch: int
    loss: float
    """Loss of the last batch on rank 0."""
    learning_rate: float


class Callback:
    """Override what you need. A method that raises ends the training; its exception reaches the caller of `fit`."""

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step, also after a restart."""

    def on_step(self, step: StepInfo) -> None:
        """Called every `log_every` steps."""

    def on_epoch(self, row: Mapping[str, float]) -> None:
        """Called after each epoch with its row of the history."""

    def on_end(self, result: Result) -> None:
        """Called once, after training and its last save."""

    def close(self) -> None:
        """Called last, also if training failed or was interrupted: release what is open."""


class Callbacks:
    """The callbacks of one worker as one. An exception gets a note that names the callback."""

    def __init__(self, members: Sequence[Callback]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def on_start(self, run: RunInfo) -> None:
        for each in self._members:
            _call(each, "on_start", run)

    def on_step(self, step: StepInfo) -> None:
        for each in self._members:
            _call(each, "on_step", step)

    def on_epoch(self, row: Mapping[str, float]) -> None:
        for each in self._members:
            _call(each, "on_epoch", dict(row))  # its own copy, which it may change

    def on_end(self, result: Result) -> None:
        for each in self._members:
            _call(each, "on_end", result)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes the others even if one raises
            for each in self._members:
                if hasattr(each, "close"):
                    stack.callback(_call, each, "close")


def _call(callback: Callback, method: str, *arguments: Any) -> None:
    try:
        getattr(callback, method)(*arguments)
    except Exception as error:
        error.add_note(f"raised by {method} of the callback {type(callback).__name__}")
        raise


@dataclass(slots=True)
class JsonLogger(Callback):
    """Writes one JSON object per epoch to a file, which is replaced as a whole and therefore never half-written.

    A value that is not finite becomes null: JSON has no NaN.
    """

    path: str | os.PathLike[str] = "history.jsonl"
    _rows: list[Mapping[str, float]] = field(default_factory=list, repr=False)

    def on_start(self, run: RunInfo) -> None:
        self._rows = list(run.history)
        self._write()

    def on_epoch(self, row: Mapping[str, float]) -> None:
        self._rows.append(row)
        self._write()

    def _write(self) -> None:
        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.new")
        draft.write_text("".join(json.dumps(_finite(row)) + "\n" for row in self._rows), encoding="utf-8")
        draft.replace(path)


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


@dataclass(slots=True)
class TensorBoard(Callback):
    """Writes TensorBoard events with the `tensorboard` or the `tensorboardX` package."""

    directory: str | os.PathLike[str] = "tensorboard"
    _writer: Any = field(default=None, repr=False)

    def on_start(self, run: RunInfo) -> None:
        # TensorBoard drops what the directory has from `purge_step` on: those steps are reported again. So is an epoch
        # that ended with the saved step, unless its row was saved too.
        is_row_saved = bool(run.history) and run.history[-1]["step"] == run.step
        self._writer = open_writer(
            summary_writer("the TensorBoard callback", field="callbacks"),
            self.directory,
            purge_step=run.step + 1 if is_row_saved else run.step,
        )

    def on_step(self, step: StepInfo) -> None:
        self._writer.add_scalar("step/loss", step.loss, step.step)
        self._writer.add_scalar("step/learning_rate", step.learning_rate, step.step)

    def on_epoch(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name not in ("epoch", "step"):
                self._writer.add_scalar(f"epoch/{name}", value, int(row["step"]))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None  # a writer has threads, which cannot be pickled for a later fit


class ProgressBar(Callback):
    """Shows a bar per epoch on a terminal, and a line with the metrics after it."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: Any = None
        self._run: RunInfo | None = None

    def on_start(self, run: RunInfo) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

        self._run = run
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("epoch", total=run.steps_per_epoch)
        self._bar.start()

    def on_step(self, step: StepInfo) -> None:
        assert self._bar is not None
        assert self._run is not None
        per_epoch = self._run.steps_per_epoch
        done = step.step if per_epoch is None else (step.step - 1) % per_epoch + 1
        last = "" if self._run.epochs is None else f"/{self._run.epochs}"
        title = f"epoch {step.epoch + 1}{last} · loss {step.loss:.4f}"
        self._bar.update(self._task, completed=done, description=title)

    def on_epoch(self, row: Mapping[str, float]) -> None:
        assert self._bar is not None
        shown = (f"{name} {value:.4f}" for name, value in row.items() if name not in ("epoch", "step"))
        self._bar.console.print(f"epoch {row['epoch'] + 1:.0f}: {', '.join(shown)}", highlight=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


_BY_NAME: dict[str, type[Callback]] = {
    "json": JsonLogger,
    "tensorboard": TensorBoard,
    "tbx": TensorBoard,
    "progress": ProgressBar,
}


def listed(given: Any) -> list[str | Callback]:
    """Return the callbacks that a user passed, one or several, as a list.

    Raises:
        InvalidArgument: One of them is neither a name nor a callback.
    """
    found = list(given) if isinstance(given, list | tuple) else [given]
    for each in found:
        create(each)
    return found


def create(spec: str | Callback) -> Callback:
    """Return the callback with a name, or the callback itself.

    Raises:
        InvalidArgument: It is neither.
    """
    if isinstance(spec, str) and spec in _BY_NAME:
        return _BY_NAME[spec]()
    if isinstance(spec, type) and issubclass(spec, Callback):
        raise InvalidArgument(
            f"callbacks= has the class {spec.__name__}; pass an instance: {spec.__name__}()", field="callbacks"
        )
    if isinstance(spec, str) or not all(hasattr(spec, name) for name in ("on_start", "on_step", "on_epoch", "on_end")):
        raise InvalidArgument(
            f"callbacks= has {spec!r}; use {', '.join(map(repr, _BY_NAME))} or a subclass of strata.train.Callback",
            field="callbacks",
        )
    return spec
