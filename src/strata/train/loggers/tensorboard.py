"""TensorBoard: event files, in which a restarted run voids the steps that it repeats."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FLUSH_S = 5
"""Longest time until a reported step is in the file of TensorBoard, and survives a kill."""


class TensorBoardLogger:
    """Writes TensorBoard events with the `tensorboard` or the `tensorboardX` package."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = directory
        self._create = summary_writer("loggers=['tensorboard']", field="loggers")
        self._writer: Any = None

    def start(self, step: int) -> None:
        self.close()
        self._writer = open_writer(self._create, self.directory, purge_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def summary_writer(what: str, *, field: str) -> Callable[..., Any]:
    """Return the class that writes TensorBoard events.

    Raises:
        ConfigError: No package has one; `what` needs it.
    """
    for package in ("torch.utils.tensorboard", "tensorboardX"):
        with contextlib.suppress(ImportError):
            found: Callable[..., Any] = importlib.import_module(package).SummaryWriter
            return found
    raise ConfigError(f"{what} needs a package that is not installed; pip install tensorboard", field=field)


def open_writer(create: Callable[..., Any], directory: str | os.PathLike[str], *, purge_step: int) -> Any:
    """Open a new file of events. TensorBoard drops what the directory has from `purge_step` on."""
    return create(
        os.fspath(directory),
        purge_step=purge_step,
        flush_secs=FLUSH_S,
        filename_suffix=f".{time.time_ns()}",  # without it, a restart within a second would overwrite the file
    )
