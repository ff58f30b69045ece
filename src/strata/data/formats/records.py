"""Where records end in a stretch of text.

Every stretch begins where a record begins; what is left behind its last record is the beginning of the next stretch. So
nothing is carried from one to the next, not even whether a quote is open. All work is done by numpy on whole stretches:
text is scanned once, at planning, and that should cost little more than reading it.

CSV is cut exactly as pyarrow's parser does it: a quote opens only where a field begins and is an ordinary character
elsewhere (`5" nails`), a doubled quote inside quotes is one character, LF, CRLF and CR end a record, and an empty line
is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

LF: Final = 0x0A
CR: Final = 0x0D
_JSON_BLANKS: Final = b" \t\r\n"


class Ends(NamedTuple):
    rows: npt.NDArray[np.int64]
    """Behind every record, its line end included. Empty lines are no records: they go with the record that follows."""
    stop: int
    """Behind the last line that is complete, empty or not: where the next stretch begins."""


class Records(Protocol):
    """Stateless; may be used by several threads at once."""

    def ends(self, data: memoryview, *, is_last: bool) -> Ends:
        """`data` begins where a record does. `is_last`: nothing follows, so what has no line end is a record too."""
        ...


@dataclass(frozen=True, slots=True)
class CsvRecords:
    delimiter: str = ","
    quote: str | None = '"'

    def ends(self, data: memoryview, *, is_last: bool) -> Ends:
        codes = np.frombuffer(data, np.uint8)
        stops = _line_ends(codes, is_last=is_last)
        if self.quote is not None and len(stops):
            quotes = np.flatnonzero(codes == ord(self.quote))
            if len(quotes):
                stops = stops[~self._is_quoted(data, codes, quotes, stops)]
        starts = _starts(stops)
        is_row = stops > starts
        short = np.flatnonzero(stops - starts == 1)
        is_row[short] = (codes[starts[short]] != CR) | (codes[stops[short]] != LF)  # a CRLF alone is an empty line
        return _closed(stops, is_row, len(data), is_last and _stop(stops) < len(data))

    def _is_quoted(
        self,
        data: memoryview,
        codes: npt.NDArray[np.uint8],
        quotes: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Which line ends are inside quotes: those with an odd number of quotes before them, if quotes are in order.

        In order means that each one which should open does so where a field begins, or doubles the one before.
        """
        opening, closing = quotes[0::2], quotes[1::2]
        before = codes[opening - 1]  # of a quote at 0 this is some other byte; it is looked at below
        is_first = (before == ord(self.delimiter)) | (before == LF) | (before == CR)
        is_first[0] |= opening[0] == 0
        is_first[1:] |= opening[1:] == closing[: len(opening) - 1] + 1
        if is_first.all():
            return (np.searchsorted(quotes, stops) & 1).astype(np.bool_)
        return self._is_quoted_in_disorder(data, stops)

    def _is_quoted_in_disorder(self, data: memoryview, stops: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """The same where some quotes are ordinary characters, which only reading from left to right can tell."""
        assert self.quote is not None
        quote, delimiter = (re.escape(character.encode()) for character in (self.quote, self.delimiter))
        quoted = re.compile(
            rb"(?<![^%b\r\n])%b[^%b]*+(?:%b%b[^%b]*+)*+%b?" % (delimiter, quote, quote, quote, quote, quote, quote)
        )
        spans = np.array([match.span() for match in quoted.finditer(data)], np.int64).reshape(-1, 2)
        last = np.zeros(len(spans) + 1, np.int64)
        last[1:] = spans[:, 1]
        return stops < last[np.searchsorted(spans[:, 0], stops)]


@dataclass(frozen=True, slots=True)
class JsonRecords:
    """One JSON value a line: a line end inside a string would have been escaped."""

    def ends(self, data: memoryview, *, is_last: bool) -> Ends:
        codes = np.frombuffer(data, np.uint8)
        stops = np.flatnonzero(codes == LF)
        starts = _starts(stops)
        is_row = stops > starts
        for line in np.flatnonzero(codes[starts] <= ord(" ")):  # few: lines that are empty, or begin with a blank
            is_row[line] = bool(bytes(data[starts[line] : stops[line]]).strip(_JSON_BLANKS))
        rest = bytes(data[_stop(stops) :]) if is_last else b""
        return _closed(stops, is_row, len(data), bool(rest.strip(_JSON_BLANKS)))


def _line_ends(codes: npt.NDArray[np.uint8], *, is_last: bool) -> npt.NDArray[np.int64]:
    """The last byte of every LF, CRLF and CR. A CR at the very end may be half of a CRLF, unless nothing follows."""
    feeds = np.flatnonzero(codes == LF)
    returns = np.flatnonzero(codes == CR)
    if len(returns) == 0:
        return feeds
    if returns[-1] == len(codes) - 1:
        lone = returns[:-1][codes[returns[:-1] + 1] != LF]
        lone = np.append(lone, returns[-1]) if is_last else lone
    else:
        lone = returns[codes[returns + 1] != LF]
    return np.sort(np.concatenate((feeds, lone))) if len(lone) else feeds


def _starts(stops: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where the lines begin that end there."""
    starts = np.zeros(len(stops), np.int64)
    starts[1:] = stops[:-1] + 1
    return starts


def _stop(stops: npt.NDArray[np.int64]) -> int:
    return int(stops[-1]) + 1 if len(stops) else 0


def _closed(stops: npt.NDArray[np.int64], is_row: npt.NDArray[np.bool_], size: int, has_rest: bool) -> Ends:
    """`has_rest`: what follows the last line end is a record too."""
    rows = stops[is_row] + 1
    return Ends(np.append(rows, size), size) if has_rest else Ends(rows, _stop(stops))


class UnitCutter:
    """Cuts records into units: each ends with the first record that brings it to `unit_bytes`.

    So where units end depends on the text alone, not on the stretches it was read in.
    """

    def __init__(self, first: int, unit_bytes: int) -> None:
        self._first = first
        self._unit_bytes = unit_bytes
        self._num_rows = 0
        self._last = first
        self.cuts: list[tuple[int, int, int]] = []
        """Of every unit: its first byte, the byte behind it, its number of rows."""

    def add(self, ends: npt.NDArray[np.int64]) -> None:
        """The ends of the next records, counted from the beginning of the text."""
        done = 0
        while done < len(ends):
            full = done + int(np.searchsorted(ends[done:], self._first + self._unit_bytes))
            if full == len(ends):
                self._num_rows += full - done
                self._last = int(ends[-1])
                return
            self._num_rows += full + 1 - done
            self._last = int(ends[full])
            self._cut()
            done = full + 1

    def close(self) -> list[tuple[int, int, int]]:
        if self._num_rows:
            self._cut()
        return self.cuts

    def _cut(self) -> None:
        self.cuts.append((self._first, self._last, self._num_rows))
        self._first, self._num_rows = self._last, 0
