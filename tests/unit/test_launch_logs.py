"""Logs are followed across rotations and shown live."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.clock import ManualClock
from strata.errors import ConfigError
from strata.launch.record.directory import RunDirectory, RunStatus, create
from strata.launch.record.display import PlainDisplay
from strata.launch.record.log import SKIPPED, LogReader, LogStream, append, last_lines, parse_which, previous
from strata.launch.record.screen import MAX_PENDING_LINES
from strata.launch.record.timeline import RunEvent
from strata.launch.spec import RunSpec, Size


def add(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def rotate(path: Path) -> None:
    path.replace(previous(path))


def new_lines(reader: LogReader, *, is_last_look: bool = False) -> list[str]:
    return [line for lines in reader.lines(is_last_look=is_last_look) for line in lines]


def test_a_reader_misses_nothing_when_the_log_is_rotated_between_two_looks(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    reader = LogReader(log)
    assert new_lines(reader) == []
    add(log, "a\nb\nhalf ")
    assert new_lines(reader) == ["a", "b"]
    add(log, "a line\nc\n")
    rotate(log)
    assert new_lines(reader) == []
    add(log, "d\nno end")
    assert new_lines(reader) == ["half a line", "c", "d"]
    assert new_lines(reader, is_last_look=True) == ["no end"]


def test_a_log_without_news_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "rank-0.log"
    reader = LogReader(log)
    add(log, "a\n")
    assert new_lines(reader) == ["a"]
    opened: list[Path] = []
    open_file = Path.open

    def counted(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path)
        return open_file(path, *args, **options)

    monkeypatch.setattr(Path, "open", counted)
    assert new_lines(reader) == []
    assert opened == []
    add(log, "b\n")
    assert new_lines(reader) == ["b"]
    assert opened == [log, log]  # to add a line, and to read it


def test_a_reader_that_was_too_slow_reports_missing_lines(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    reader = LogReader(log)
    add(log, "a\n")
    assert new_lines(reader) == ["a"]
    for text in ("b\n", "c\n", "d\n"):
        rotate(log)
        add(log, text)
    assert new_lines(reader) == [*SKIPPED.decode().splitlines(), "c", "d"]


@given(num_lines=st.integers(0, 8), num_old=st.integers(0, 5), num_new=st.integers(0, 5))
def test_the_last_lines_are_found_in_both_halves(num_lines: int, num_old: int, num_new: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "rank-0.log"
        lines = [f"line {n}" for n in range(num_old + num_new)]
        add(log, "".join(f"{line}\n" for line in lines[:num_old]))
        rotate(log)
        add(log, "".join(f"{line}\n" for line in lines[num_old:]))

        expected = lines[-num_lines:] if num_lines else []
        assert new_lines(LogReader(log, num_lines)) == expected
        if num_lines:
            assert last_lines(log, num_lines) == expected


def test_a_log_from_another_machine_has_the_same_limit(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    for number in range(1_000):
        append(log, b"line %03d\n" % number, max_bytes=200)

    assert log.stat().st_size + previous(log).stat().st_size <= 200 + 9
    assert last_lines(log, 5) == [f"line {number}" for number in range(995, 1_000)]


# -- shown while it runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("STRATA_RUNS_DIR", str(tmp_path))
    return create(RunSpec(name="job", script="/t.py", directory="/", checkpoints="/c", workers=Size(2, 2)))


def streaming(run: RunDirectory, which: Any) -> tuple[LogStream, io.StringIO, io.StringIO]:
    events, output = io.StringIO(), io.StringIO()
    return LogStream(run, PlainDisplay(events, ManualClock(), output), which), events, output


@pytest.mark.parametrize(
    ("which", "expected"),
    [("auto", "[0] a\n"), ("rank0", "[0] a\n"), ("all", "[0] a\n[1] b\n"), ("none", "")],
)
def test_the_chosen_ranks_are_shown_with_their_numbers(run: RunDirectory, which: str, expected: str) -> None:
    shown, _, output = streaming(run, which)
    add(run.log_path(0, 0), "a\n")
    add(run.log_path(0, 1), "b\n")
    shown.update()
    shown.close()
    assert output.getvalue() == expected


def test_a_stream_that_shows_no_rank_does_not_look_for_output(run: RunDirectory) -> None:
    shown, _, _ = streaming(run, "none")
    asyncio.run(asyncio.wait_for(shown.run(), 5.0))


def test_an_event_is_shown_after_earlier_output(run: RunDirectory) -> None:
    out = io.StringIO()
    shown = LogStream(run, PlainDisplay(out, ManualClock(), out), "auto")
    add(run.log_path(0, 0), "\x1b[31mred\x1b[0m\x1b]0;title\x07\nlast words")
    add(run.log_path(1, 0), "the next attempt\nhas no end")
    shown.print_event(RunEvent(at_s=ManualClock().wall_s(), monotonic_s=0.0, what="failed", text="rank 0"))
    shown.close()
    assert [line.strip() for line in out.getvalue().splitlines()] == [
        "[0] red",
        "[0] last words",
        "[0] the next attempt",
        "0.00 s  failed: rank 0",
        "[0] has no end",
    ]


def test_a_resumed_run_does_not_show_its_past_again(run: RunDirectory) -> None:
    add(run.log_path(0, 0), "past\n")
    run.write_status(msgspec.structs.replace(RunStatus.of_this_process(now_s=0.0), state="stopped", attempt=0))
    shown, _, output = streaming(run, "auto")
    add(run.log_path(1, 0), "now\n")
    shown.close()
    assert output.getvalue() == "[0] now\n"


def test_a_slow_reader_gets_the_number_of_omitted_lines() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as output:
        display = PlainDisplay(io.StringIO(), ManualClock(), output)
        for number in range(30):
            display.write(0, [f"line {number} {'x' * 50} {n}" for n in range(1_000)])
        got = b""
        for _ in range(200):
            display.write(0, [])
            os.set_blocking(reading, False)
            try:
                while block := os.read(reading, 1 << 20):
                    got += block
            except BlockingIOError:
                pass
        display.close()
    lines = got.decode().splitlines()
    os.close(reading)
    left_out = [line for line in lines if line.startswith("[strata: ")]
    assert len(left_out) == 1
    assert "`strata logs` shows all" in left_out[0]
    assert len(lines) - 1 + int(left_out[0].split()[1].replace(",", "")) == 30_000
    assert len(lines) > MAX_PENDING_LINES
    assert lines[-1].endswith(" 999")


def test_another_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="not one of auto, all, rank0, none"):
        parse_which("rank1")
