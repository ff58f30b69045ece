"""Text of other programs is printed without control sequences."""

from __future__ import annotations

import io
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from strata.printing import counted, log_line, printable
from strata.terminal import Console, as_json, echo, tame_logging

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(ANY_TEXT)
def test_printed_text_has_no_control_characters(text: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    table = Table(escape(text), title=escape(text))
    table.add_row(escape(text), Text(text))
    console.print(table)
    console.print(escape(text))
    console.print(Text(text))

    assert printable(text).isprintable()
    assert out.getvalue().replace("\n", "").isprintable()
    assert as_json({text: text}).isprintable()
    assert json.loads(as_json({text: text})) == {text: text}
    assert log_line(text).isprintable()


def test_a_line_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    echo("a\nforged", "b\r\x1b[2J\u202e\x9b", style="red")
    assert capsys.readouterr().out == "a\\nforged\nb\\r\\x1b[2J\\u202e\\x9b\n"


@pytest.mark.parametrize(
    ("line", "plain", "coloured"),
    [
        ("\x1b[1;31mred\x1b[0m", "red", "\x1b[1;31mred\x1b[0m\x1b[0m"),
        ("\x1b[38;5;9mleft on", "left on", "\x1b[38;5;9mleft on\x1b[0m"),
        ("\x1b]0;title\x07\x1b[2J\x1b[10;10Hx", "x", "x"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link", "link"),
        ("\x9d0;title\x9c\x9b2Jx\x90q\x9c", "x", "x"),
        (" 10%\r\x1b[32m 20%\r\n", "20%", "\x1b[32m 20%\x1b[0m"),
        ("\u202eabc\x00\x08", "abc", "abc"),
        ("a\tb", "a   b", "a   b"),
    ],
)
def test_a_log_line_keeps_only_its_colours_and_only_on_request(line: str, plain: str, coloured: str) -> None:
    assert log_line(line).strip() == plain
    assert log_line(line, with_colours=True) == coloured


def test_warnings_are_escaped_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert logging.lastResort is not None
    before = logging.lastResort.formatter
    tame_logging()
    try:
        record = logging.LogRecord("x", logging.WARNING, "", 1, "of %s", ("a\n\x1b[2Jb",), None)
        logging.lastResort.emit(record)
    finally:
        logging.lastResort.setFormatter(before)
    assert capsys.readouterr().err == "of a\\n\\x1b[2Jb\n"


def test_one_takes_the_singular() -> None:
    assert [counted(n, "worker") for n in (0, 1, 2, 1_000)] == ["0 workers", "1 worker", "2 workers", "1,000 workers"]
    assert [counted(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]
