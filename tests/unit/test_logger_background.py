"""Loggers that write on a thread of their own: what they skip, and that a slow or broken package holds up nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from strata.train.loggers import background
from strata.train.loggers.background import BackgroundLogger, Report, Written, begins_anew
from strata.train.loggers.base import Loggers


class Sink:
    def __init__(self, *, gate: threading.Event | None = None, failing: str = "") -> None:
        self.opened: list[int] = []
        self.steps: list[int] = []
        self.closed: list[bool] = []
        self._gate = gate
        self._failing = failing

    def open(self, step: int) -> None:
        self.opened.append(step)
        self._called("open")

    def write(self, reports: Sequence[Report]) -> None:
        self._called("write")
        self.steps += [each.step for each in reports]

    def close(self, *, is_failing: bool) -> None:
        self.closed.append(is_failing)
        self._called("close")

    def _called(self, what: str) -> None:
        if self._gate is not None:
            assert self._gate.wait(30)
        if what == self._failing:
            raise OSError("the disk is full")


def reports(*steps: int) -> list[Report]:
    return [Report(step, {"loss": 1.0}, 0.0) for step in steps]


def test_every_report_is_written_in_order_and_the_outcome_is_passed_on() -> None:
    sink = Sink()
    loggers = Loggers([BackgroundLogger(sink)])
    for step in range(1, 100):
        loggers.log(step, {"loss": 1.0})
    loggers.close(is_failing=True)
    assert (sink.opened, sink.steps, sink.closed) == ([1], list(range(1, 100)), [True])


def test_steps_of_an_earlier_process_and_steps_that_are_made_again_are_not_new() -> None:
    written = Written(last_step=4)
    assert [each.step for each in written.new(reports(3, 4, 5, 5, 6))] == [5, 5, 6]
    assert [each.step for each in written.new(reports(7, 2, 6, 7, 8))] == [7, 8]
    assert [each.step for each in written.new(reports(1, 8, 9))] == [9]


@pytest.mark.parametrize(
    ("step", "first_step", "attempt", "expected"),
    [(1, None, 0, True), (1, 1, 0, True), (10, 10, 0, True), (5, 1, 0, False), (1, 1, 1, False), (1, None, 1, True)],
)
def test_a_process_that_nothing_restarted_or_resumed_begins_a_new_run(
    step: int, first_step: int | None, attempt: int, expected: bool
) -> None:
    assert begins_anew(step, first_step=first_step, attempt=attempt) is expected


@pytest.mark.parametrize("failing", ["open", "write", "close"])
def test_a_package_that_fails_is_dropped_with_one_warning(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    loggers = Loggers([BackgroundLogger(Sink(failing=failing))])
    loggers.log(1, {"loss": 1.0})
    loggers.close()
    assert [each.getMessage() for each in caplog.records] == [
        "BackgroundLogger failed and logs nothing more; training continues: OSError: the disk is full"
    ]


def test_a_slow_package_neither_blocks_training_nor_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "MAX_REPORTS", 3)
    gate = threading.Event()
    sink = Sink(gate=gate)
    logger = BackgroundLogger(sink)
    loggers = Loggers([logger])
    for step in range(1, 10):
        loggers.log(step, {"loss": 1.0})
    with pytest.raises(TimeoutError, match=r"3 reports were not written within 0\.01 s"):
        logger.flush(0.01)
    gate.set()
    logger.flush(30)
    loggers.log(10, {"loss": 1.0})
    loggers.close()
    assert sink.steps == [1, 2, 3, 10]
    assert [each.getMessage() for each in caplog.records] == [
        "BackgroundLogger is 3 reports behind; the next ones are not logged until it catches up"
    ]


def test_a_package_that_never_answers_delays_the_end_by_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "CLOSE_S", 0.01)
    gate = threading.Event()
    loggers = Loggers([BackgroundLogger(Sink(gate=gate))])
    loggers.log(1, {"loss": 1.0})
    loggers.close()
    gate.set()
    assert "TimeoutError: its last reports were not written within 0.01 s" in caplog.text
