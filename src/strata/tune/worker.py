"""A process of a trial: it receives its configuration, calls the training function, and reports to the driver.

It is forked from a warm process, so its start takes milliseconds. Reports of `trial.report` and of any context of
`strata.init()` go to the driver as they come; of several ranks, rank 0 reports. What the driver decides takes effect at
the next report: a pruned trial exits there, and one that will be continued saves first, if its function saves at all.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from strata.errors import (
    ConfigError,
    CoordinatorUnavailable,
    InvalidArgument,
    StaleIncarnation,
    UnknownJob,
    UnknownWorker,
)
from strata.launch.environment import STOPPED, UNREACHABLE, read_environment, worker_environment
from strata.lifecycle import leave
from strata.train import context as contexts
from strata.train.function import FUNCTION, read_call, trusted, written
from strata.tune import messages as m
from strata.tune.devices import count_gpus, device_variables
from strata.tune.link import DriverLost, Link
from strata.tune.state.events import MAX_REASON, MAX_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from strata.train.context import Context
    from strata.tune.state.events import Values

ENDPOINT = "driver.json"
"""File beside the training function that has the address and the credentials of the driver."""
SAVE_S = 30.0
"""Time for a trial to save after it was asked to; then it stops at its next report without."""
LOST = (CoordinatorUnavailable, StaleIncarnation, UnknownJob, UnknownWorker)
"""Errors of a process that the coordinator has removed, or that cannot reach it: the configuration is not the cause."""


class RunningTrial:
    """What a training function may receive as its second argument."""

    def __init__(self, order: m.Order, link: Link) -> None:
        self.number = order.trial
        self.config = dict(order.config)
        self.rank = order.worker.identity.rank
        self.world_size = order.worker.identity.world_size
        self._metrics = order.metrics
        self._latest: dict[str, float | None] = {}
        """Last reported value of each metric but the first, which may not be in every report."""
        self._link = link
        self._asked_s: float | None = None
        self.last_values: Values | None = None
        """Objectives of the last report."""

    def report(self, *, step: int, **metrics: float) -> None:
        """Report metrics, the objective among them. Exits if the trial is to stop. Of several ranks, the values of
        rank 0 count.

        Raises:
            InvalidArgument: The step is not an integer, or negative.
        """
        step = _checked(step)
        self._stop_if_asked(None)
        self._send(step, metrics)

    def note(self, *, step: int, **metrics: float) -> None:
        """Report metrics from a loop that cannot save here, but at its next step, which it reports to its context: a
        request to stop takes effect there.
        """
        if self.rank == 0:
            self._link.answer()
        self._send(step, metrics)

    def reported(self, context: Context, metrics: Mapping[str, float]) -> None:
        """A context of this process has reported.

        Raises:
            InvalidArgument: Its step is not an integer, or negative.
        """
        step = _checked(context.step)
        self._stop_if_asked(context)
        self._send(step, metrics)

    def saving(self, context: Context) -> None:  # noqa: ARG002 - the port
        """Wait until the journal has all reports: a trial that resumes from the checkpoint does not repeat them."""
        self._link.settle()

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest |= {name: _finite(metrics[name]) for name in self._metrics[1:] if name in metrics}
        if self.rank == 0 and self._metrics[0] in metrics:
            others = [self._latest.get(name) for name in self._metrics[1:]]
            self.last_values = (_finite(metrics[self._metrics[0]]), *others)
            self._link.report(step, self.last_values)

    def _stop_if_asked(self, context: Context | None) -> None:
        stop = self._link.answer() if self.rank == 0 else None  # the other ranks end with rank 0
        if stop is None:
            return
        if stop.is_saving and context is not None and context.saves:
            if self._asked_s is None:
                self._asked_s = time.monotonic()
                context.ask_stop(stop.reason)
            if time.monotonic() - self._asked_s < SAVE_S:
                return  # `maybe_checkpoint` saves and exits
        raise SystemExit(STOPPED)


def main() -> None:
    spec = read_environment(os.environ)
    if spec is None or len(sys.argv) != 2:
        raise ConfigError("this module runs trials of a study only; call TrainingOrchestrator.tune()")
    call = Path(sys.argv[1])
    with _leaving_if_lost():
        link = Link(read_endpoint(call), m.Hello(launch=spec.identity.attempt, rank=spec.identity.rank))
        order = link.begin()
        if order is None:
            raise SystemExit(STOPPED)
        os.environ.update(worker_environment(replace(order.worker, coordinator=spec.coordinator)))
        if order.seats:
            # This process was forked from one that may have imported torch. The variable is still in time: CUDA reads
            # it when it is initialized, and no process that has initialized CUDA is forked.
            os.environ.update(device_variables(os.environ, order.seats, order.num_seats, count_gpus))
        trial = RunningTrial(order, link)
        contexts.listen(trial)
        try:
            function = read_call(call / FUNCTION).function
            result = function(trial.config, trial) if takes_trial(function) else function(trial.config)
            values = _values(result, order.metrics)
        except (DriverLost, *LOST):
            raise
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
            values = None
        except Exception as error:
            link.fail(_last_words(error))
            raise
        if trial.rank == 0:
            link.finish(values if values is not None else trial.last_values)


@contextlib.contextmanager
def _leaving_if_lost() -> Iterator[None]:
    try:
        yield
    except DriverLost as error:
        print(f"strata: {error}", file=sys.stderr, flush=True)
        raise SystemExit(UNREACHABLE) from None
    except LOST as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(UNREACHABLE) from None


def write_endpoint(call: Path, endpoint: m.Endpoint) -> None:
    """Store how to reach the driver, where only this user can read it."""
    with written(call / ENDPOINT) as file:
        file.write(msgspec.json.encode(endpoint))


def read_endpoint(call: Path) -> m.Endpoint:
    """
    Raises:
        ConfigError: It is not on this machine, or other users can write to it.
    """
    try:
        with trusted(call / ENDPOINT) as file:
            return msgspec.json.decode(file.read(m.MAX_BYTES), type=m.Endpoint)
    except FileNotFoundError:
        raise ConfigError(
            f"{call / ENDPOINT} is not on this machine; to run trials on several machines, set STRATA_RUNS_DIR to a "
            "directory that all of them share"
        ) from None


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
    if len(metrics) > 1 or isinstance(result, bool) or not hasattr(result, "__float__"):
        return None
    try:
        return (_finite(float(result)),)
    except (TypeError, ValueError, RuntimeError):  # an array, or a tensor, of several values
        return None


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _checked(step: Any) -> int:
    """Return a step as the messages have it: numbers of numpy and torch are integers, too.

    Raises:
        InvalidArgument: It is not an integer, or out of range.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise InvalidArgument(f"step={step!r} must be an integer from 0 to 2**63 - 1", field="step")
    return number


def _last_words(error: Exception) -> str:
    """Return an error as the reason of a failure, also with bytes of a file name that are no text."""
    text = f"{type(error).__name__}: {error}"[:MAX_REASON]
    return text.encode(errors="backslashreplace").decode()


def _exit_code() -> int:
    """Run the trial and return the exit code. An error, or a message as the code, is the interpreter's to print."""
    try:
        main()
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        return ended.code or 0
    return 0


if __name__ == "__main__":
    leave(_exit_code())  # the next trial waits for the end of this process
