"""The port of loggers, and the loggers of a process as one."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Protocol

from strata.train.loggers.background import BackgroundLogger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

log = logging.getLogger("strata.train.loggers")


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

    def close(self, *, is_failing: bool = False) -> None:
        """Close all. `is_failing`: the script has failed, which MLflow and W&B show."""
        for each in self._members:
            if isinstance(each, BackgroundLogger):
                each.is_failing = is_failing
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
