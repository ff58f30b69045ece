"""The end of a log: read quickly, cleaned, and searched for a cause."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.launch.record.log import MAX_CAUSE_CHARS, MAX_END_BYTES, cause, last_lines, last_words, tail_start
from strata.printing import log_line

TRACEBACK = """\
epoch 3
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
    ~~~~^^
  File "train.py", line 1, in main
    raise ValueError("bad row 7")
ValueError: bad row 7
"""


def log_of(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "rank-0.log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# -- the cause ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError('bad row 7')", "ValueError: bad row 7"),
        ("raise ValueError('bad\\nrow\\n\\n7')", "ValueError: bad"),
        ("try:\n  1 / 0\nexcept Exception:\n  raise KeyError('x')", "KeyError: 'x'"),
        ("class Odd(Exception): pass\nraise Odd", "Odd"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise ExceptionGroup('many', [TypeError('2')])", "ExceptionGroup: many (1 sub-exception)"),
        ("import sys; sys.exit('no data in /data')", "no data in /data"),
        (
            "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()",
            "Fatal Python error: Segmentation fault",
        ),
        (
            "class Late:\n  def __del__(self): raise OSError('late')\nlate = Late()\nraise ValueError('bad')",
            "ValueError: bad",
        ),
        ("print('step 7', flush=True); print(); import os; os.kill(os.getpid(), 9)", "step 7"),
    ],
)
def test_the_cause_is_the_exception_that_python_prints(tmp_path: Path, code: str, expected: str) -> None:
    path = tmp_path / "rank-0.log"
    with path.open("wb") as log:
        subprocess.run([sys.executable, "-I", "-S", "-c", code], stdout=log, stderr=log, check=False, cwd=tmp_path)

    assert last_words(path) == expected


def test_complaints_after_a_traceback_are_not_the_cause(tmp_path: Path) -> None:
    noise = "[W1116] destroy_process_group() was not called\nresource_tracker: There appear to be 2 leaked objects\n"

    assert last_words(log_of(tmp_path, TRACEBACK + noise)) == "ValueError: bad row 7"


def test_a_traceback_that_the_program_survived_is_not_the_cause(tmp_path: Path) -> None:
    after = "".join(f"step {n}\n" for n in range(100))

    assert last_words(log_of(tmp_path, TRACEBACK + after)) == "step 99"


def test_the_prefix_that_torch_gives_to_a_traceback_is_left_out(tmp_path: Path) -> None:
    prefixed = "".join(f"[rank3]: {line}\n" for line in TRACEBACK.splitlines()[1:])

    assert last_words(log_of(tmp_path, f"epoch 3\n{prefixed}")) == "ValueError: bad row 7"


def test_of_an_exception_group_the_last_traceback_is_the_cause() -> None:
    lines = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "x.py", line 8, in <module>',
        "  | ExceptionGroup: many (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        '    |   File "x.py", line 4, in <module>',
        "    | ValueError: bad row 7",
        "    +------------------------------------",
    ]

    assert cause(lines) == "ValueError: bad row 7"
    assert cause(lines[:4]) == "ExceptionGroup: many (1 sub-exception)"


def test_a_traceback_that_was_cut_leaves_its_last_line() -> None:
    assert cause(TRACEBACK.splitlines()[:3]) == 'File "train.py", line 3, in <module>'


def test_a_cause_has_an_end(tmp_path: Path) -> None:
    assert len(last_words(log_of(tmp_path, "x" * 10_000))) == MAX_CAUSE_CHARS
    assert last_words(log_of(tmp_path, "ValueError: " + "y" * 10_000)).endswith("y…")


def test_an_empty_or_missing_log_has_no_cause(tmp_path: Path) -> None:
    assert last_words(tmp_path / "none.log") == ""
    assert last_words(log_of(tmp_path, "")) == ""
    assert last_words(log_of(tmp_path, "\n \n\n")) == ""


# -- cleaning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m plain", "red plain"),
        ("\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "textlink"),
        ("a\x1bPdevice\x1b\\b\x1b(Bc\x1b7d\x9b31me", "abcde"),
        ("bell\x07 nul\x00 \u202eturned", "bell nul turned"),
        (" 10%|█   |\r 20%|██  |\r 30%|███ |\r\n", " 30%|███ |"),
        ("a\tb", "a   b"),
        ("cut \x1b[", "cut"),
        ("cut \x1b", "cut"),
        ("naïve – 你好", "naïve – 你好"),
    ],
)
def test_control_characters_are_removed(line: str, shown: str) -> None:
    assert log_line(line) == shown


@given(st.text())
def test_a_cleaned_line_is_printable_and_stays_so(line: str) -> None:
    cleaned = log_line(line)

    assert cleaned.isprintable()
    assert log_line(cleaned) == cleaned


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path: Path) -> None:
    assert (
        last_words(log_of(tmp_path, b"caf\xe9 \xff\xfe"))
        == "caf\N{REPLACEMENT CHARACTER} " + 2 * "\N{REPLACEMENT CHARACTER}"
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def test_the_last_lines_come_from_the_end_and_not_more_is_read(tmp_path: Path) -> None:
    path = log_of(tmp_path, "".join(f"line {n}\n" for n in range(100_000)))

    assert last_lines(path, 3) == ["line 99997", "line 99998", "line 99999"]
    all_of_it = last_lines(path)
    assert all_of_it[-1] == "line 99999"
    assert sum(len(line) + 1 for line in all_of_it) <= MAX_END_BYTES
    assert all(line.startswith("line ") for line in all_of_it), "the first is a whole one"
    assert last_lines(path, 2, max_bytes=15) == ["line 99999"]
    assert last_lines(path, 0) == []


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=12), st.integers(0, 14))
def test_the_start_of_the_tail_is_that_of_a_line(lines: list[bytes], num_lines: int) -> None:
    for end in (b"", b"\n"):
        data = b"\n".join(lines) + (end if lines else b"")
        whole = data.removesuffix(b"\n").split(b"\n") if data else []
        start = tail_start(io.BytesIO(data), num_lines, max_bytes=1_000)
        tail = data[start:].removesuffix(b"\n").split(b"\n") if data[start:] else []

        assert tail == whole[len(whole) - min(num_lines, len(whole)) :]


def test_an_unreadable_log_has_no_cause(tmp_path: Path) -> None:
    for path in (tmp_path / "none.log", tmp_path):  # the second is EISDIR, as EIO or ESTALE are elsewhere
        assert (last_lines(path), last_words(path)) == ([], "")
