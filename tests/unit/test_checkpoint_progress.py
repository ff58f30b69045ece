"""Progress: how often callbacks are called, and that a bar is drawn only on a terminal."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.tools import progress
from strata.checkpoint.tools.progress import EVERY_S, Progress, watching
from strata.clock import ManualClock


def test_on_progress_gets_the_bytes_and_the_end() -> None:
    events: list[Progress] = []
    clock = ManualClock()
    with watching("saving", 100, on_progress=events.append, clock=clock) as watch:
        for _ in range(10):
            clock.advance(0.5)
            watch.advance(10)

    assert [event.done_bytes for event in events] == list(range(10, 101, 10)), "the end is reported once"
    assert events[4] == Progress(words="saving", done_bytes=50, total_bytes=100, bytes_per_s=20.0)
    assert (events[4].fraction, events[-1].fraction) == (0.5, 1.0)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1_000)), max_size=60))
def test_on_progress_is_called_at_most_ten_times_a_second_and_last_with_the_total(
    moves: list[tuple[float, int]],
) -> None:
    events: list[tuple[float, int]] = []
    clock = ManualClock()
    listen = lambda event: events.append((clock.monotonic_s(), event.done_bytes))  # noqa: E731
    with watching("saving", None, on_progress=listen, clock=clock) as watch:
        for pause_s, num_bytes in moves:
            clock.advance(pause_s)
            watch.advance(num_bytes)

    assert events[-1][1] == sum(num_bytes for _, num_bytes in moves)
    assert [done for _, done in events] == sorted(done for _, done in events)
    times = [at_s for at_s, _ in events[:-1]]  # without the last call
    assert all(later - earlier >= EVERY_S for earlier, later in itertools.pairwise(times))


def test_bytes_of_many_threads_are_all_counted_and_reported_in_order() -> None:
    events: list[int] = []
    together = threading.Barrier(8)
    with watching("saving", 80_000, on_progress=lambda event: events.append(event.done_bytes)) as watch:

        def move() -> None:
            together.wait()
            for _ in range(1_000):
                watch.advance(10)

        threads = [threading.Thread(target=move) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert events[-1] == 80_000
    assert events == sorted(set(events))


def test_an_on_progress_that_raises_is_logged_and_the_work_continues(caplog: pytest.LogCaptureFixture) -> None:
    num_calls = []

    def fail(event: Progress) -> None:
        num_calls.append(event)
        raise RuntimeError("no room to draw")

    clock = ManualClock()
    with caplog.at_level(logging.ERROR), watching("saving", 3, on_progress=fail, clock=clock) as watch:
        for _ in range(3):
            clock.advance(1)
            watch.advance(1)

    assert len(num_calls) == 1
    assert "on_progress failed while saving; it will not be called again" in caplog.text


def test_failed_work_is_not_reported_as_done() -> None:
    events: list[Progress] = []

    def work() -> None:
        with watching("saving", 100, on_progress=events.append, clock=ManualClock()) as watch:
            watch.advance(100)
            raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        work()
    assert events == []


# -- the bar -------------------------------------------------------------------------------------------------------


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Bars appear at once; the event is set when one does."""
    shown = threading.Event()
    real = progress.ProgressCounter.show

    def show(counter: progress.ProgressCounter) -> None:
        real(counter)
        shown.set()

    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress.ProgressCounter, "show", show)
    monkeypatch.setenv("TERM", "xterm")
    yield shown
    assert not [thread for thread in threading.enumerate() if thread.name == "strata-progress"]


def test_short_work_draws_nothing_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 3_600.0)
    with watching("saving", 10) as watch:
        watch.advance(10)

    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_long_work_draws_a_bar_and_removes_it(at_once: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    with watching("saving [red]x", 10 << 20) as watch:
        assert at_once.wait(10)
        watch.advance(5 << 20)
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]

    assert "saving [red]x" in drawn
    assert drawn.endswith("\x1b[2K"), "the line is cleared at the end"


@pytest.mark.parametrize("reason", ["no terminal", "dumb", "show=False", "a listener", "no stderr"])
def test_no_bar_is_created_where_none_is_wanted(
    reason: str, at_once: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO() if reason == "no terminal" else FakeTerminal()
    monkeypatch.setattr(sys, "stderr", None if reason == "no stderr" else stream)
    monkeypatch.setenv("FORCE_COLOR", "1")
    if reason == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    listener = (lambda _event: None) if reason == "a listener" else None
    with watching("saving", 10, on_progress=listener, show=False if reason == "show=False" else None) as watch:
        watch.advance(10)

    assert not at_once.is_set()
    assert stream.getvalue() == ""


def test_a_real_terminal_shows_the_bar_while_stdout_stays_clean() -> None:
    script = (
        "import threading\n"
        "from strata.checkpoint.tools import progress\n"
        "progress.SHOWN_AFTER_S = 0.0\n"
        "shown, real = threading.Event(), progress.ProgressCounter.show\n"
        "progress.ProgressCounter.show = lambda self: (real(self), shown.set())\n"
        "with progress.watching('loading', 1 << 30) as watch:\n"
        "    assert shown.wait(10)\n"
        "    watch.advance(1 << 29)\n"
        "print('done')\n"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=-1, stderr=theirs) as process:
        os.close(theirs)
        drawn = b""
        try:
            while piece := os.read(ours, 4_096):
                drawn += piece
        except OSError:  # the other side has closed
            pass
        out, _ = process.communicate()
    os.close(ours)

    assert (process.returncode, out) == (0, b"done\n")
    assert b"loading" in drawn
    assert b"1.0 GiB" in drawn
