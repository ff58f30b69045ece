"""Loggers of a script: what rank 0 reports, written where other tools read it. `strata.init(loggers=["tensorboard"])`.

A logger receives the first step of its process, because a restarted run repeats the steps since its last checkpoint:
what an earlier process has written from that step on is void. A logger that fails is dropped with a warning, as no
chart is worth a run.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from strata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

log = logging.getLogger(__name__)

FLUSH_S = 5
"""Longest time until a reported step is in the file of TensorBoard, and survives a kill."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


class Logger(Protocol):
    """All methods are called by the training thread of rank 0, so they should return soon."""

    def start(self, step: int) -> None:
        """Called before the first report, and again if the script goes back: this step and all later ones follow, also
        those that are logged already.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called for every report that has metrics."""

    def close(self) -> None:
        """Called last."""


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


class Loggers:
    """The loggers of one process as one, without those that have failed."""

    def __init__(self, members: Iterable[Logger] = ()) -> None:
        self._members = list(members)
        self._last = -math.inf
        """The last logged step."""
        self._is_started = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._members or not metrics:
            return
        if not self._is_started or step < self._last:
            self._is_started = True
            self._call("start", step)
        self._last = step
        self._call("log", step, metrics)

    def close(self) -> None:
        self._call("close")
        self._members = []

    def _call(self, method: str, *arguments: Any) -> None:
        for each in list(self._members):
            try:
                getattr(each, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - process boundary: other people's code, beside training
                self._members.remove(each)
                log.warning(
                    "%s failed and logs nothing more; training continues: %s: %s",
                    type(each).__name__,
                    type(error).__name__,
                    error,
                )


def checked(given: Any) -> list[str | Logger]:
    """Return the loggers that a script passed, one or several.

    Raises:
        ConfigError: One of them is neither a name nor a logger.
    """
    found: list[str | Logger] = [given] if isinstance(given, str) or not hasattr(given, "__iter__") else list(given)
    for each in found:
        is_logger = not isinstance(each, str | type) and all(hasattr(each, name) for name in ("start", "log", "close"))
        if each != "tensorboard" and not is_logger:
            raise ConfigError(
                f"loggers= has {each!r}; use 'tensorboard', or an object with start(step), log(step, metrics) and "
                "close()",
                field="loggers",
            )
    return found


def create(given: Iterable[str | Logger], *, run: str) -> Loggers:
    """Return loggers that `checked` has accepted.

    Raises:
        ConfigError: A package is missing.
    """
    directory = Path("tensorboard") / (_NOT_IN_NAMES.sub("-", run).lstrip(".-") or "run")
    return Loggers(TensorBoardLogger(directory) if isinstance(each, str) else each for each in given)
