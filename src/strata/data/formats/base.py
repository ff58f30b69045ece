"""The port that every file format implements, and what it promises.

A file is a row of *units*: the smallest parts that can be decoded on their own. A Parquet row group, an ORC stripe, an
Arrow record batch, a range of bytes that ends where a record ends. Units have rows, in the file's order, and their
number of rows is known before they are decoded: the order of a dataset is arithmetic on these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pyarrow as pa

    from strata.data.filter.expression import Node, Presence
    from strata.data.source.ranges import Range
    from strata.data.source.source import DataFile, Source
    from strata.errors import DataError, StorageError


@dataclass(frozen=True, slots=True)
class Unit:
    index: int
    """Its place in the file, from 0."""
    num_rows: int
    first_row: int
    """How many rows of the file come before it."""
    offset: int
    """Its first byte in the file; where a format does not tell, an estimate."""
    num_bytes: int
    """How much is read to decode the columns that were asked for."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file says of itself."""

    schema: pa.Schema
    """All columns, without metadata that does not belong to a field."""
    units: tuple[Unit, ...]
    version: str
    """Changes when the contents do, and with nothing else: not when the file is copied or touched."""
    null_counts: Mapping[str, int] = field(default_factory=dict)
    """How many nulls a top-level column has; a column that is not named may have any number."""


Rows = tuple[int, int]
"""Of a unit: the first, counted from 0, and how many."""


def joined(rows: Sequence[Rows], max_parts: int) -> tuple[Rows, ...]:
    """The same rows, neighbours as one; and if these are too many stretches, with the smallest gaps between them."""
    made: list[list[int]] = []
    for first, num_rows in sorted(rows):
        if made and made[-1][1] >= first:
            made[-1][1] = max(made[-1][1], first + num_rows)
        else:
            made.append([first, first + num_rows])
    if len(made) > max_parts:
        gaps = sorted(range(1, len(made)), key=lambda place: made[place][0] - made[place - 1][1])
        kept = sorted(gaps[len(made) - max_parts :])
        starts, ends = [0, *kept], [*(place - 1 for place in kept), len(made) - 1]
        made = [[made[start][0], made[end][1]] for start, end in zip(starts, ends, strict=True)]
    return tuple((first, end - first) for first, end in made)


@dataclass(frozen=True, slots=True)
class Judged:
    """What statistics of smaller parts than units say about the rows of a unit that pass a filter.

    Ascending, and none in two; rows that are in neither do not pass.
    """

    passing: tuple[Rows, ...]
    open: tuple[Rows, ...]
    """They may pass or not."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What it saves to read some rows of a unit instead of all."""

    num_pages: int = 0
    num_pages_skipped: int = 0
    num_bytes: int = 0
    """Of all rows."""
    bytes_skipped: int = 0

    def __add__(self, other: Saving) -> Saving:
        return Saving(
            self.num_pages + other.num_pages,
            self.num_pages_skipped + other.num_pages_skipped,
            self.num_bytes + other.num_bytes,
            self.bytes_skipped + other.bytes_skipped,
        )


class Reader(Protocol):
    """One open file, used by one thread at a time."""

    bytes_read: int
    """So far, by this reader; what was asked of the disk or the network, footers included."""

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        """These top-level columns of the unit, in this order, `unit.num_rows` rows. No column: a table with rows only.

        Raises:
            DataFileInvalid: Damaged; the message names the file, the unit and the row it begins with.
            DataFileChanged: The file is not the one that was planned.
            SchemaMismatch: It is whole, but what was guessed of it is wrong.
            DataFileMissing: It is gone.
            StorageError: It cannot be reached.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class PagedReader(Protocol):
    """A reader that knows of smaller parts than units (a Parquet file's pages), and can leave some out."""

    def judge(self, units: Sequence[Unit], condition: Node, schema: pa.Schema) -> Mapping[int, Judged]:
        """By the index of the unit, for those of which more is known than that rows may pass. `condition` and `schema`
        as in `Format.presence`; what cannot be read is not known.
        """
        ...

    def saving(self, unit: Unit, columns: Sequence[str], rows: Sequence[Rows]) -> Saving:
        """What `read_rows` would leave out."""
        ...

    def read_rows(self, unit: Unit, columns: Sequence[str], rows: Sequence[Rows]) -> pa.Table:
        """As `Reader.read`, these rows alone. Rows ascend; there is at least one, and one column."""
        ...


UnitRanges = Callable[[Unit], "Sequence[Range]"]
"""Which bytes are read of a unit. Called by several threads at once; may itself read a little. Raises what
`Reader.read` does.
"""


@runtime_checkable
class Ranged(Protocol):
    """A format that knows which bytes a unit's columns are in, so that they can be fetched before they are needed."""

    def ranges(self, source: Source, file: DataFile, columns: Sequence[str], version: str) -> UnitRanges:
        """For the units of this file: all bytes that `Reader.read` of these columns will ask for, and perhaps some
        more. Raises what `Reader.read` does.
        """
        ...


@runtime_checkable
class PagedRanged(Ranged, Protocol):
    """The same for some rows of units, as `PagedReader` reads them."""

    def page_ranges(
        self,
        source: Source,
        file: DataFile,
        columns: Sequence[str],
        version: str,
        rows: Mapping[int, Sequence[Rows]],
    ) -> UnitRanges:
        """Of units in `rows`, which are told by their index: what these rows are in."""
        ...


@runtime_checkable
class Together(Protocol):
    """A format that looks into many files in less time than into one after the other."""

    def inspect_all(
        self, source: Source, files: Sequence[DataFile], *, columns: Sequence[str] | None, with_nulls: Sequence[bool]
    ) -> list[FileFacts | DataError | StorageError]:
        """For each file what `Format.inspect` gives or raises; `with_nulls` is told for each, too."""
        ...


@runtime_checkable
class Headed(Protocol):
    """A format that can give the first rows of a unit without decoding the others."""

    def read_head(self, reader: Reader, unit: Unit, columns: Sequence[str], num_rows: int) -> pa.Table:
        """As `Reader.read` of a reader of this format, so many rows. There is at least one column."""
        ...


@runtime_checkable
class Guessing(Protocol):
    """A format whose files do not state their columns: these are guessed from the beginning of a file."""

    @property
    def is_keyed(self) -> bool:
        """Whether records name their fields, so that a file may have columns which its beginning does not show."""
        ...

    def informed(self, *, decided: Collection[str], is_chosen: bool) -> Format:
        """The same, knowing what was not guessed: `decided`, columns whose types the user gave; `is_chosen`, whether
        the user named the columns to deliver.
        """
        ...


def is_keyed(format: Format) -> bool:
    return isinstance(format, Guessing) and format.is_keyed


class Format(Protocol):
    """Stateless; every method may be called from several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def unit_name(self) -> str:
        """What a unit is called: row group, stripe, …"""
        ...

    @property
    def is_typed(self) -> bool:
        """Whether files state the types of their columns. Those of text are guessed from their beginning."""
        ...

    def inspect(
        self,
        source: Source,
        file: DataFile,
        *,
        columns: Sequence[str] | None,
        unit_bytes: int,
        with_nulls: bool = True,
    ) -> FileFacts:
        """Looks into the file, reading as little as possible.

        `columns`: whose bytes count, and whose nulls are of interest; None: all of them. Names that the file does not
        have are passed over. `unit_bytes`: about how large to make units where the format leaves it open (text).
        `with_nulls`: otherwise nulls need not be counted where that takes time.

        Raises:
            DataFileInvalid: It is damaged, or of another format; the message says which.
            DataFileMissing, StorageError: As for `Reader.read`.
        """
        ...

    def presence(
        self, source: Source, file: DataFile, facts: FileFacts, condition: Node, schema: pa.Schema
    ) -> list[Presence]:
        """For every unit, what its statistics say about a filter (`pruning.py`). SOME is always true enough.

        `schema`: the filter's columns, as the file calls them, with the types in which their rows are compared. These
        hold every value of the file exactly.
        """
        ...

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> Reader:
        """`schema`: what types to read where the format does not say. `version`: as it was when it was planned."""
        ...
