"""The process of a trial: it receives its configuration, calls the training function, and reports to the driver.

It is forked from a warm process, so its start takes milliseconds. Reports of `trial.report` and of any context of
`strata.init()` go to the driver as they come. What it decides takes effect at the next report: a pruned trial exits
there, and one that will be continued saves first, if its function saves at all.
"""

from __future__ import annotations

import inspect
import math
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.errors import ConfigError, InvalidArgument
from strata.launch.environment import STOPPED, read_environment
from strata.train import context as contexts
from strata.train.function import read_call
from strata.tune import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strata.train.context import Context
    from strata.tune.state.events import Values

ANSWER_S = 60.0
"""Longest wait for the answer to a report; then training continues without."""
SAVE_S = 30.0
"""Time for a trial to save after it was asked to; then it stops at its next report without."""


class RunningTrial:
    """What a training function may receive as its second argument."""

    def __init__(self, order: m.Order, link: _Link) -> None:
        self.number = order.trial
        self.config = dict(order.config)
        self._metrics = order.metrics
        self._latest: dict[str, float | None] = {}
        """Last reported value of each metric but the first, which may not be in every report."""
        self._link = link
        self._asked_s: float | None = None
        self.last_values: Values | None = None
        """Objectives of the last report."""

    def report(self, *, step: int, **metrics: float) -> None:
        """Report metrics, the objective among them. Exits if the trial is to stop.

        Raises:
            InvalidArgument: The step is negative.
        """
        if step < 0:
            raise InvalidArgument(f"step={step} must be 0 or more", field="step")
        self._stop_if_asked(None)
        self._send(step, metrics)

    def reported(self, context: Context, metrics: Mapping[str, float]) -> None:
        """A context of this process has reported."""
        self._stop_if_asked(context)
        self._send(context.step, metrics)

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest |= {name: _finite(metrics[name]) for name in self._metrics[1:] if name in metrics}
        if self._metrics[0] in metrics:
            others = [self._latest.get(name) for name in self._metrics[1:]]
            self.last_values = (_finite(metrics[self._metrics[0]]), *others)
            self._link.send(m.Report(step=step, values=self.last_values))

    def _stop_if_asked(self, context: Context | None) -> None:
        stop = self._link.answer()
        if stop is None:
            return
        if stop.is_saving and context is not None:
            if self._asked_s is None:
                self._asked_s = time.monotonic()
                context.ask_stop(stop.reason)
            if time.monotonic() - self._asked_s < SAVE_S:
                return  # `maybe_checkpoint` saves and exits
        raise SystemExit(STOPPED)


class _Link:
    """The connection to the driver. A thread receives."""

    def __init__(self, path: str) -> None:
        self._stop: m.StopTrial | None = None
        self._num_open = 0
        """Reports without an answer."""
        self._answered = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: m.FromTrial) -> None:
        if isinstance(message, m.Report):
            with self._answered:
                self._num_open += 1
        with self._sending:
            self._socket.sendall(m.encode(message))

    def answer(self) -> m.StopTrial | None:
        """Wait until all reports are answered; return the request to stop, if there is one."""
        with self._answered:
            if not self._answered.wait_for(lambda: self._stop is not None or self._num_open == 0, ANSWER_S):
                self._num_open = 0
            return self._stop

    def receive(self) -> m.ToTrial | None:
        line = self._lines.readline(m.MAX_BYTES)
        return m.to_trial.decode(line) if line else None

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="strata-trial", daemon=True).start()

    def _listen(self) -> None:
        while (message := self.receive()) is not None:
            with self._answered:
                if isinstance(message, m.StopTrial):
                    self._stop = message
                self._num_open = max(0, self._num_open - 1)
                self._answered.notify()


def main() -> None:
    spec = read_environment(os.environ)
    if spec is None or len(sys.argv) != 3:
        raise ConfigError("this module runs trials of a study only; call TrainingOrchestrator.tune()")
    link = _Link(sys.argv[2])
    link.send(m.Hello(slot=spec.identity.rank, launch=spec.identity.attempt))
    order = link.receive()
    if not isinstance(order, m.Order):  # stopped before it began
        raise SystemExit(STOPPED)
    link.listen()
    os.environ.update(order.environment)
    trial = RunningTrial(order, link)
    contexts.listen(trial.reported)
    try:
        function = read_call(Path(sys.argv[1])).function
        result = function(trial.config, trial) if takes_trial(function) else function(trial.config)
        values = _values(result, order.metrics)
    except Exception as error:
        link.send(m.Failure(reason=f"{type(error).__name__}: {error}"[:2_000]))
        raise
    link.send(m.Result(values=values if values is not None else trial.last_values))


def takes_trial(function: Callable[..., Any]) -> bool:
    """Return whether a training function takes the trial beside the configuration."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len([each for each in positional if each.default is each.empty]) >= 2 or (
        len(positional) >= 2 and positional[1].name == "trial"
    )


def _values(result: Any, metrics: tuple[str, ...]) -> Values | None:
    """Return the objectives in what a training function has returned; None if they are not in there."""
    if isinstance(result, dict) and metrics[0] in result:
        return tuple(_finite(result.get(name)) for name in metrics)
    if isinstance(result, int | float) and not isinstance(result, bool) and len(metrics) == 1:
        return (_finite(result),)
    return None


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


if __name__ == "__main__":
    main()
