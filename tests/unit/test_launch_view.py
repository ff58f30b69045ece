"""The display of a run: a view that fits, complete lines, and nothing that could end or delay the run."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TextIO

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from strata.clock import ManualClock
from strata.coordinator.state.server_figures import ServerFigures
from strata.launch.record.display import LiveDisplay, LoggingDisplay, PlainDisplay, SilentDisplay, display_for
from strata.launch.record.timeline import RunEvent
from strata.launch.record.view import (
    MAX_WORKERS_SHOWN,
    RunView,
    WorkerView,
    describe_checkpoint,
    fold,
    metric_names,
    progress,
    render,
)
from strata.printing import printable

WORKER = WorkerView(
    rank=0, state="TRAINING", step=120, epoch=3, metrics={"loss": 0.25, "rows_per_s": 12_345.6}, silent_s=0.2
)
VIEW = RunView(
    name="251116-0912-3fa2",
    phase="running",
    attempt=1,
    world_size=2,
    num_restarts=1,
    max_restarts=3,
    elapsed_s=754.2,
    workers=[WORKER, replace(WORKER, rank=1, step=118)],
    checkpoint="step 100, 0.8 s ago",
    last_event="rank 1: killed by SIGKILL",
    directory="/home/someone/.local/state/strata/runs/251116-0912-3fa2",
)


def drawn(view: RunView, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(view))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def event(what: str, text: str, at_s: float = 1_700_000_001.5) -> RunEvent:
    return RunEvent(at_s=at_s, monotonic_s=1.0, what=what, text=text)


# -- the picture -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "saving", "expected"),
    [
        (None, [], ""),
        (None, [(-1, 0.0), (-1, 0.9)], ""),
        ((100, 0.84), [(-1, 0.0)], "step 100, 0.8 s ago"),
        ((100, -0.2), [], "step 100, 0.0 s ago"),
        (None, [(50, 0.25), (50, 0.5)], "saving step 50, 25%"),
        ((50, 0.3), [(50, 0.25), (50, 0.5)], "step 50, 0.3 s ago"),
        ((50, 3.0), [(100, 0.75), (-1, 0.9), (50, 0.1)], "step 50, 3.0 s ago; saving step 100, 75%"),
    ],
)
def test_the_last_checkpoint_and_the_save_in_progress_are_described(
    last: tuple[int, float] | None, saving: list[tuple[int, float]], expected: str
) -> None:
    assert describe_checkpoint(last, saving) == expected


def test_the_view_shows_workers_checkpoint_and_directory() -> None:
    assert drawn(VIEW) == [
        "run 251116-0912-3fa2             running · 2 workers · 1 of 3 restarts · 0:12:34",
        "rank  state              step  epoch      loss    rows/s    silent",
        "   0  training            120      3      0.25    12,346     0.2 s",
        "   1  training            118      3      0.25    12,346     0.2 s",
        "checkpoint  step 100, 0.8 s ago",
        "last event  rank 1: killed by SIGKILL",
        "directory   /home/someone/.local/state/strata/runs/251116-0912-3fa2",
    ]


def test_what_is_not_known_yet_takes_no_line() -> None:
    view = replace(VIEW, workers=[], checkpoint="", last_event="", num_restarts=0, world_size=1, phase="starting")

    assert [line.split()[0] for line in drawn(view)] == ["run", "directory"]
    assert "starting · 1 worker · 0 of 3 restarts" in drawn(view)[0]


def test_after_the_last_failure_there_was_no_restart() -> None:
    assert "3 of 3 restarts" in drawn(replace(VIEW, num_restarts=3))[0]


def test_a_silent_worker_and_a_nan_metric_are_highlighted() -> None:
    odd = [
        replace(WORKER, metrics={"loss": math.nan}, silent_s=45.23, state="LOADING_DATA"),
        replace(WORKER, rank=1, metrics={}, silent_s=math.inf, state="starting"),
        replace(WORKER, rank=2, metrics={"loss": 1e300}, silent_s=7_200.0),
    ]

    assert [line.split() for line in drawn(replace(VIEW, workers=odd))[2:5]] == [
        ["0", "loading", "data", "120", "3", "nan", "45.2", "s"],
        ["1", "starting", "120", "3", "never"],
        ["2", "training", "120", "3", "1e+300", "2:00:00"],
    ]


def test_more_metrics_are_shown_where_there_is_room() -> None:
    metrics = {"zeta": 1.0, "accuracy": 0.5, **WORKER.metrics}
    view = replace(VIEW, workers=[replace(WORKER, metrics=metrics)])

    assert drawn(view, 80)[1].split()[4:] == ["loss", "rows/s", "silent"]
    assert drawn(view, 120)[1].split()[4:] == ["loss", "rows/s", "accuracy", "zeta", "silent"]
    assert metric_names([WORKER, replace(WORKER, metrics={"a": 1.0})], max_names=9) == ["loss", "rows_per_s", "a"]


def test_of_many_workers_the_slowest_and_the_fastest_are_shown_and_the_others_counted() -> None:
    workers = [replace(WORKER, rank=rank, step=1_000 - rank) for rank in range(64)]
    lines = drawn(replace(VIEW, workers=workers, world_size=64))[2:-3]

    assert len(lines) == MAX_WORKERS_SHOWN + 1
    assert [int(line.split()[0]) for line in lines[:8]] == list(range(63, 55, -1))
    assert lines[8].split() == ["…", "48", "more", "945", "–", "992"]
    assert [int(line.split()[0]) for line in lines[9:]] == list(range(7, -1, -1))


def test_among_workers_of_one_step_a_silent_one_is_among_the_slowest() -> None:
    workers = [replace(WORKER, rank=rank, silent_s=60.0 if rank == 40 else rank / 100) for rank in range(64)]

    shown, folded = fold(workers)

    assert [worker.rank for worker in shown[:3]] == [40, 0, 1]
    assert len(shown) + len(folded) == 64


def test_on_a_low_terminal_fewer_workers_are_shown() -> None:
    workers = [replace(WORKER, rank=rank) for rank in range(64)]
    console = Console(file=io.StringIO(), width=80, height=14, force_terminal=True)
    console.print(render(replace(VIEW, workers=workers)))

    assert isinstance(console.file, io.StringIO)
    assert len(console.file.getvalue().splitlines()) <= 14


TEXTS = st.text(max_size=20) | st.text(min_size=100, max_size=120)
WORKERS = st.builds(
    WorkerView,
    rank=st.integers(0, 4_095),
    state=TEXTS,
    step=st.integers(0, 10**9),
    epoch=st.integers(0, 10**5),
    metrics=st.dictionaries(TEXTS | st.sampled_from(["loss", "rows_per_s"]), st.floats(), max_size=4),
    silent_s=st.floats(0) | st.just(math.nan),
)
VIEWS = st.builds(
    RunView,
    name=st.text("abc-[]", min_size=1, max_size=63),
    phase=TEXTS,
    attempt=st.integers(0, 999),
    world_size=st.integers(0, 4_096),
    num_restarts=st.integers(0, 100),
    max_restarts=st.integers(0, 100),
    elapsed_s=st.floats(0, 1e7),
    workers=st.lists(WORKERS, max_size=3, unique_by=lambda worker: worker.rank),
    checkpoint=TEXTS,
    last_event=TEXTS,
    directory=TEXTS,
)


@settings(max_examples=50)
@given(VIEWS)
def test_whatever_a_program_calls_its_things_the_view_fits_and_holds_no_control_characters(view: RunView) -> None:
    lines = drawn(view)

    assert len(lines) <= 8
    assert all(line.isprintable() for line in lines)
    assert all(cell_len(line) <= 80 for line in lines)
    assert progress(view).isprintable()


def test_markup_in_a_name_is_text() -> None:
    workers = [replace(WORKER, metrics={"[red]x[/]": 1.0}, state="[bold]y")]
    view = replace(VIEW, workers=workers, last_event="[/nonsense] \x1b[2J \\[x]")

    text = "\n".join(drawn(view))

    assert "[red]x[/]" in text
    assert "[bold]y" in text
    assert r"[/nonsense] \x1b[2J \[x]" in text


def test_printable_text_is_as_long_as_it_may_be() -> None:
    assert printable("naïve [x] \\ 你") == "naïve [x] \\ 你"
    assert printable("a\x1b[31m\n\u202e\udcff") == r"a\x1b[31m\n\u202e\udcff"
    assert printable("abcdef", max_chars=6) == "abcdef"
    assert printable("abcdefg", max_chars=6) == "abcde…"
    assert len(printable("\x00" * 10**6, max_chars=10)) == 10


# -- plain lines -------------------------------------------------------------------------------------------------------


def test_without_a_terminal_each_event_and_every_ten_seconds_is_a_line() -> None:
    clock, out = ManualClock(), io.StringIO()
    display = display_for(out, clock, quiet=False)
    assert isinstance(display, PlainDisplay)

    display.print_event(event("started", "attempt 0 with 2 workers"))
    for _ in range(99):
        clock.advance(0.25)
        display.show(VIEW)
    display.print_event(event("failed", "rank 1: killed\x1b[2J"))
    display.close()
    display.print_event(event("finished", "too late"))
    display.show(VIEW)

    how = "running: step 120 (rank 1: 118), loss 0.25, 24,691 rows/s, 2 workers, 1 of 3 restarts"
    assert out.getvalue().splitlines() == [
        "    1.50 s  started: attempt 0 with 2 workers",
        f"   0:12:34  {how}, checkpoint step 100, 0.8 s ago",
        f"   0:12:34  {how}, checkpoint step 100, 0.8 s ago",
        r"    1.50 s  failed: rank 1: killed\x1b[2J",
    ]


def test_a_stream_that_knows_no_such_letter_gets_its_number() -> None:
    raw = io.BytesIO()
    display = PlainDisplay(io.TextIOWrapper(raw, encoding="ascii"), ManualClock(), io.StringIO())
    display.print_event(event("failed", "naïve"))

    assert raw.getvalue().endswith(b"failed: na\\xefve\n")


def test_quiet_is_silent() -> None:
    out = io.StringIO()
    display = display_for(out, ManualClock(), quiet=True)
    display.print_event(event("failed", "x"))
    display.show(VIEW)
    display.close()

    assert isinstance(display, SilentDisplay)
    assert out.getvalue() == ""


def test_a_broken_pipe_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w")  # noqa: PTH123, SIM115
    display = display_for(stream, ManualClock())
    display.print_event(event("failed", "x"))
    display.print_event(event("failed", "y"))
    display.close()
    with contextlib.suppress(BrokenPipeError):  # data is left in its buffer
        stream.close()


def test_a_full_pipe_does_not_delay_the_run_and_gets_the_lines_later() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader, open(writing, "w") as stream:  # noqa: PTH123
        display = PlainDisplay(stream, ManualClock(), io.StringIO())
        for number in range(1_200):
            display.print_event(event("failed", f"{number} " + "x" * 200))  # would block after about 300 lines
        output = b""
        while b" 1199 " not in output:
            output += reader.read(1 << 20)
            display.show(VIEW)

    numbers = [int(line.split()[3]) for line in output.splitlines()]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0


# -- live --------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def live(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> tuple[LiveDisplay, io.StringIO]:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "24"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    out = Terminal()
    return LiveDisplay(out, clock, out), out


def test_the_live_view_is_drawn_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    display, out = live(clock, monkeypatch)
    try:
        for number in range(100):
            display.show(replace(VIEW, directory=f"/{number}/"))
            clock.advance(0.02)
        assert out.getvalue().count("directory") == 8
    finally:
        display.close()

    assert "/99/" in out.getvalue(), "the last view stays"
    assert out.getvalue().endswith("\x1b[?25h"), "the cursor is back"
    display.close()


def test_events_except_checkpoints_are_printed_above_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    display, out = live(ManualClock(), monkeypatch)
    display.print_event(event("started", "attempt 0 with 2 workers"))
    display.show(VIEW)
    display.print_event(event("checkpoint", "step 100"))
    display.print_event(event("failed", "rank 1: [red]\x1b[2J"))
    display.close()

    output = out.getvalue()
    assert r"failed: rank 1: [red]\x1b[2J" in output
    assert "checkpoint: " not in output
    assert "last event" not in output, "the event is printed above the view"
    assert output.index("started: attempt 0") < output.index("run 251116") < output.index("failed: rank 1")


def test_lines_of_workers_scroll_above_the_live_view_without_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    display, out = live(ManualClock(), monkeypatch)
    display.show(VIEW)
    display.write(3, ["\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J[bold]plain", " 10%\r 20%"])
    display.write(None, [f"line {number}" for number in range(1_000)])
    display.close()

    output = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # its colours
    assert "[3] red [bold]plain" in output
    assert "[3]  20%" in output
    assert "title" not in output
    assert "[strata: 900 lines omitted; `strata logs` shows all]" in output
    assert "line 999" in output
    assert "line 899" not in output


def test_lines_of_workers_go_to_stdout_if_that_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, file = Terminal(), io.StringIO()
    display = LiveDisplay(terminal, ManualClock(), file)
    display.write(0, ["\x1b[31mred\x1b[0m"])
    display.close()

    assert file.getvalue() == "[0] red\n"
    assert "red" not in terminal.getvalue()


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, TextIO]]:
    outside, inside = pty.openpty()
    stream = open(inside, "w")  # noqa: PTH123, SIM115
    try:
        yield outside, stream
    finally:
        with contextlib.suppress(OSError):
            os.close(outside)
        with contextlib.suppress(OSError):
            stream.close()


def test_a_terminal_gets_the_live_view_unless_it_is_a_dumb_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (_, stream):
        monkeypatch.setenv("TERM", "xterm")
        assert isinstance(display_for(stream, ManualClock()), LiveDisplay)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(display_for(stream, ManualClock()), PlainDisplay)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(display_for(io.StringIO(), ManualClock()), PlainDisplay)


def test_a_closed_terminal_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock = ManualClock()
    with terminal() as (outside, stream):
        display = display_for(stream, clock)
        display.show(VIEW)
        os.close(outside)
        clock.advance(1.0)
        display.show(VIEW)
        display.print_event(event("failed", "x"))
        display.close()


def test_a_stopped_terminal_does_not_block_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without a reader, as after Ctrl-S."""
    monkeypatch.setenv("TERM", "xterm")
    clock = ManualClock()
    with terminal() as (outside, stream):
        display = display_for(stream, clock)
        for number in range(60):
            display.print_event(event("hung", f"event {number}"))
            display.show(VIEW)
            clock.advance(1.0)
        os.set_blocking(outside, False)
        output = b""
        for _ in range(1_000):
            with contextlib.suppress(BlockingIOError):
                output += os.read(outside, 1 << 16)
            clock.advance(1.0)
            display.show(VIEW)
            if b"event 59" in output:
                break
        assert b"event 59" in output
        os.close(outside)
        display.close()


# -- parameter servers -------------------------------------------------------------------------------------------------

FIGURES = ServerFigures(rows=26_093, bytes=1_468_006, evicted=0, pulls_per_s=137.52, pushes_per_s=137.6, staleness=1)
SERVER = WorkerView(
    rank=2, state="TRAINING", step=118, epoch=0, metrics={"rows": 26_093}, silent_s=0.1, server=0, figures=FIGURES
)
WITH_SERVERS = replace(
    VIEW,
    world_size=4,
    num_servers=2,
    workers=[*VIEW.workers, SERVER, replace(SERVER, rank=3, server=1, state="RECOVERING", figures=None)],
)


def test_servers_have_a_table_of_their_own_below_the_workers() -> None:
    lines = drawn(WITH_SERVERS, 100)
    assert "2 workers and 2 servers" in lines[0]
    assert lines[1].split() == ["rank", "state", "step", "epoch", "loss", "rows/s", "silent"]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[4].split() == ["server", "state", "step", "rows", "memory", "pulls/s", "pushes/s", "stale", "silent"]
    assert lines[5].split() == ["0", "serving", "118", "26,093", "1.4", "MiB", "137.5", "137.6", "1", "0.1", "s"]
    assert lines[6].split() == ["1", "recovering", "118", "0.1", "s"], "nothing was measured yet"


def test_hits_and_evictions_are_shown_once_there_are_any() -> None:
    figures = msgspec.structs.replace(FIGURES, hits=75, misses=25, evicted=1_200)
    lines = drawn(replace(WITH_SERVERS, workers=[replace(SERVER, figures=figures)]), 100)
    assert lines[1].split()[-3:] == ["hits", "evicted", "silent"]
    assert lines[2].split()[-4:] == ["75.0%", "1,200", "0.1", "s"]


def test_a_progress_line_counts_servers_apart_and_ignores_their_steps() -> None:
    line = progress(WITH_SERVERS)
    assert "step 120 (rank 1: 118)" in line
    assert "2 workers and 2 servers (26,093 rows, 1.4 MiB, 137.5 pulls/s)" in line


def test_many_servers_leave_room_for_the_workers() -> None:
    workers = [replace(WORKER, rank=rank) for rank in range(100)]
    servers = [replace(SERVER, rank=100 + number, server=number, step=number) for number in range(100)]
    lines = drawn(replace(VIEW, world_size=200, num_servers=100, workers=[*workers, *servers]), 100)
    assert len(lines) <= 2 * MAX_WORKERS_SHOWN
    assert sum("more" in line for line in lines) == 2


def test_lines_of_a_server_start_with_its_number() -> None:
    output = io.StringIO()
    display = SilentDisplay(output)
    display.write(2, ["restored"], name="server 0")
    display.write(1, ["step 1"])
    display.close()
    assert output.getvalue() == "[server 0] restored\n[1] step 1\n"


def test_a_failure_that_a_run_survives_is_logged_and_one_that_ends_it_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    display = LoggingDisplay(io.StringIO(), "job")
    for what, text in (
        ("started", "attempt 0 with 2 workers"),
        ("failed", "rank 1: killed by SIGKILL"),
        ("started", "attempt 1 with 2 workers"),
        ("failed", "rank 0: ValueError: no"),
        ("ending", "1 failure"),
    ):
        display.print_event(event(what, text))

    assert caplog.messages == ["run job: rank 1: killed by SIGKILL; started: attempt 1 with 2 workers"]
