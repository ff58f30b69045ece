"""Callbacks: what a fit reports while it runs. They run on rank 0, between steps.

A resumed run repeats no report: `on_start` receives the rows of the epochs before, so that a logger replaces what it
wrote after the checkpoint.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.progress import Progress

    from strata.trainer.history import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is known when training starts or resumes."""

    epochs: int
    steps_per_epoch: int | None
    """None if the loader does not know its length."""
    step: int
    """0, or the last step before a resume."""
    history: Sequence[Mapping[str, float]]
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
    """Override what you need. A method that raises ends the training."""

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step, also after a restart."""

    def on_step(self, step: StepInfo) -> None:
        """Called every `log_every` steps."""

    def on_epoch(self, row: Mapping[str, float]) -> None:
        """Called after each epoch with its row of the history."""

    def on_end(self, result: Result) -> None:
        """Called once, after training and its last save."""


@dataclass(slots=True)
class JsonLogger(Callback):
    """Writes one JSON object per epoch to a file, which is replaced as a whole and therefore never half-written."""

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
        draft.write_text("".join(json.dumps(row) + "\n" for row in self._rows), encoding="utf-8")
        draft.replace(path)


@dataclass(slots=True)
class TensorBoard(Callback):
    """Writes TensorBoard events with the `tensorboard` or the `tensorboardX` package."""

    directory: str | os.PathLike[str] = "tensorboard"
    _writer: Any = field(default=None, repr=False)

    def on_start(self, run: RunInfo) -> None:
        # Steps after a checkpoint are repeated after a restart; TensorBoard drops their first version.
        self._writer = _summary_writer()(os.fspath(self.directory), purge_step=run.step + 1)

    def on_step(self, step: StepInfo) -> None:
        self._writer.add_scalar("step/loss", step.loss, step.step)
        self._writer.add_scalar("step/learning_rate", step.learning_rate, step.step)

    def on_epoch(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name not in ("epoch", "step"):
                self._writer.add_scalar(f"epoch/{name}", value, int(row["step"]))
        self._writer.flush()

    def on_end(self, result: Result) -> None:  # noqa: ARG002 - the protocol's
        self._writer.close()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional
    except ImportError:
        try:
            from tensorboardX import SummaryWriter as _Writer  # noqa: PLC0415
        except ImportError:
            raise ConfigError(
                "the TensorBoard callback needs a package that is not installed; pip install tensorboard",
                field="callbacks",
            ) from None
        return _Writer
    return SummaryWriter


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
        title = f"epoch {step.epoch + 1}/{self._run.epochs} · loss {step.loss:.4f}"
        self._bar.update(self._task, completed=done, description=title)

    def on_epoch(self, row: Mapping[str, float]) -> None:
        assert self._bar is not None
        shown = (f"{name} {value:.4f}" for name, value in row.items() if name not in ("epoch", "step"))
        self._bar.console.print(f"epoch {int(row['epoch']) + 1}: {', '.join(shown)}", highlight=False)

    def on_end(self, result: Result) -> None:  # noqa: ARG002 - the protocol's
        self.close()

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


def create(spec: str | Callback) -> Callback:
    """Return the callback with a name, or the callback itself.

    Raises:
        InvalidArgument: It is neither.
    """
    if isinstance(spec, str) and spec in _BY_NAME:
        return _BY_NAME[spec]()
    if isinstance(spec, str) or not all(hasattr(spec, name) for name in ("on_start", "on_step", "on_epoch", "on_end")):
        raise InvalidArgument(
            f"callbacks= has {spec!r}; use {', '.join(map(repr, _BY_NAME))} or a subclass of strata.train.Callback",
            field="callbacks",
        )
    callback: Callback = spec
    return callback
