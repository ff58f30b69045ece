"""Find record ends in a stretch of text, and cut text into row groups.

Every stretch begins at a record, and the bytes after its last record begin the next stretch. So no state passes from
one to the next, not even whether a quote is open. numpy processes whole stretches: planning scans all text once, which
should cost little more than reading it.

CSV records end exactly where pyarrow's parser ends them: a quote opens only at the start of a field and is an ordinary
character elsewhere (`5" nails`), a doubled quote inside quotes is one character, LF, CRLF and CR end a record, and an
empty line is not a record.
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
    """The offset after each record and its line end. Empty lines belong to the record that follows."""
    stop: int
    """The offset after the last complete line, empty or not: the start of the next stretch."""


class Records(Protocol):
    """The record syntax of a text format. Stateless and thread-safe."""

    def ends(self, data: memoryview, *, is_last: bool) -> Ends:
        """Find record ends in `data`, which begins at a record. In the last stretch, a line end may be missing."""
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
        is_row[short] = (codes[starts[short]] != CR) | (codes[stops[short]] != LF)  # a lone CRLF is an empty line
        return _closed(stops, is_row, len(data), is_last and _stop(stops) < len(data))

    def _is_quoted(
        self,
        data: memoryview,
        codes: npt.NDArray[np.uint8],
        quotes: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Return which line ends are inside quotes: those after an odd number of quotes, if quotes are regular.

        Quotes are regular if every opening quote starts a field or doubles the quote before it.
        """
        opening, closing = quotes[0::2], quotes[1::2]
        before = codes[opening - 1]  # an unrelated byte for a quote at 0, which is handled below
        is_first = (before == ord(self.delimiter)) | (before == LF) | (before == CR)
        is_first[0] |= opening[0] == 0
        is_first[1:] |= opening[1:] == closing[: len(opening) - 1] + 1
        if is_first.all():
            return (np.searchsorted(quotes, stops) & 1).astype(np.bool_)
        return self._is_quoted_irregularly(data, stops)

    def _is_quoted_irregularly(self, data: memoryview, stops: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Do the same where some quotes are ordinary characters, which takes a scan from left to right."""
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
    """One JSON value per line; a line end inside a string is escaped."""

    def ends(self, data: memoryview, *, is_last: bool) -> Ends:
        codes = np.frombuffer(data, np.uint8)
        stops = np.flatnonzero(codes == LF)
        starts = _starts(stops)
        is_row = stops > starts
        for line in np.flatnonzero(codes[starts] <= ord(" ")):  # few lines are empty or begin with white space
            is_row[line] = bool(bytes(data[starts[line] : stops[line]]).strip(_JSON_BLANKS))
        rest = bytes(data[_stop(stops) :]) if is_last else b""
        return _closed(stops, is_row, len(data), bool(rest.strip(_JSON_BLANKS)))


def _line_ends(codes: npt.NDArray[np.uint8], *, is_last: bool) -> npt.NDArray[np.int64]:
    """Return the last byte of every LF, CRLF and CR. A final CR may be half of a CRLF unless the text ends there."""
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
    """Return the starts of the lines that end at `stops`."""
    starts = np.zeros(len(stops), np.int64)
    starts[1:] = stops[:-1] + 1
    return starts


def _stop(stops: npt.NDArray[np.int64]) -> int:
    return int(stops[-1]) + 1 if len(stops) else 0


def _closed(stops: npt.NDArray[np.int64], is_row: npt.NDArray[np.bool_], size: int, has_rest: bool) -> Ends:
    """Return the ends; with `has_rest`, the bytes after the last line end are a record too."""
    rows = stops[is_row] + 1
    return Ends(np.append(rows, size), size) if has_rest else Ends(rows, _stop(stops))


class UnitCutter:
    """Cuts records into row groups, each of which ends with the first record that brings it to `unit_bytes`.

    The cuts therefore depend on the text alone, not on the stretches in which it was read.
    """

    def __init__(self, first: int, unit_bytes: int) -> None:
        self._first = first
        self._unit_bytes = unit_bytes
        self._num_rows = 0
        self._last = first
        self.cuts: list[tuple[int, int, int]] = []
        """For every row group: its first byte, the byte after it, and its number of rows."""

    def add(self, ends: npt.NDArray[np.int64]) -> None:
        """Add the ends of the next records, as offsets in the text."""
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
