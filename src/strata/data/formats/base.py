"""The port that every file format implements, and its guarantees.

A file is a sequence of *row groups*, the smallest parts that can be decoded on their own: a Parquet row group, an ORC
stripe, an Arrow record batch, or a byte range of text that ends with a record. The number of rows of each row group is
known before it is decoded, because the row order of a dataset is computed from these numbers. In code a row group is a
`Unit`, so that it is not confused with that of Parquet.

A format implements `Format`, and its `open` returns a `Reader`. The other protocols are optional: a format or a reader
that implements one is asked for more (`isinstance`), such as the byte ranges to prefetch.
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
    """A row group of a file."""

    index: int
    """The position in the file, from 0."""
    num_rows: int
    first_row: int
    """The number of rows before it in the file."""
    offset: int
    """The offset of its first byte in the file; an estimate where the format does not state it."""
    num_bytes: int
    """The bytes to read to decode the requested columns."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The metadata of a file."""

    schema: pa.Schema
    """All columns, without schema-level metadata."""
    units: tuple[Unit, ...]
    version: str
    """Changes if and only if the contents change: copying or touching the file keeps it."""
    null_counts: Mapping[str, int] = field(default_factory=dict)
    """The number of nulls per top-level column; a column that is missing here may have any number."""
    num_incomplete: int = 0
    """Samples that are not rows because they lack a required part (tar shards)."""


Rows = tuple[int, int]
"""Consecutive rows of a row group: the first, counted from 0, and their number."""


def join_rows(rows: Sequence[Rows], max_parts: int) -> tuple[Rows, ...]:
    """Join adjacent rows, then the smallest gaps too until at most `max_parts` stretches remain."""
    made: list[list[int]] = []
    for first, num_rows in sorted(rows):
        if made and made[-1][1] >= first:
            made[-1][1] = max(made[-1][1], first + num_rows)
        else:
            made.append([first, first + num_rows])
    if len(made) > max_parts:
        gaps = sorted(range(1, len(made)), key=lambda index: made[index][0] - made[index - 1][1])
        kept = sorted(gaps[len(made) - max_parts :])
        starts, ends = [0, *kept], [*(index - 1 for index in kept), len(made) - 1]
        made = [[made[start][0], made[end][1]] for start, end in zip(starts, ends, strict=True)]
    return tuple((first, end - first) for first, end in made)


@dataclass(frozen=True, slots=True)
class Judged:
    """What page statistics decide about the rows of a row group.

    Both lists ascend and are disjoint; rows in neither do not pass.
    """

    passing: tuple[Rows, ...]
    open: tuple[Rows, ...]
    """Rows that may pass or not."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What reading some rows of a row group saves over reading all of them."""

    num_pages: int = 0
    num_pages_skipped: int = 0
    num_bytes: int = 0
    """The bytes of all rows."""
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
    """The bytes that this reader has requested from disk or network so far, footers included."""

    def read(self, unit: Unit, columns: Sequence[str]) -> pa.Table:
        """Return these top-level columns of the row group, in this order. Without columns, the table has rows only.

        Raises:
            DataFileInvalid: The file is damaged; the message names the file, the row group and its first row.
            DataFileChanged: The file has changed since it was planned.
            SchemaMismatch: The file is intact, but its guessed schema is wrong.
            DataFileMissing: The file no longer exists.
            StorageError: The file cannot be reached.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class PagedReader(Protocol):
    """A reader that can skip parts of a row group (the pages of a Parquet file)."""

    def judge(self, units: Sequence[Unit], condition: Node, schema: pa.Schema) -> Mapping[int, Judged]:
        """Return what page statistics decide, by row group index, for the row groups where they decide anything.

        `condition` and `schema` are those of `Format.presence`. Statistics that cannot be read decide nothing.
        """
        ...

    def saving(self, unit: Unit, columns: Sequence[str], rows: Sequence[Rows]) -> Saving:
        """Return what `read_rows` would skip."""
        ...

    def read_rows(self, unit: Unit, columns: Sequence[str], rows: Sequence[Rows]) -> pa.Table:
        """Return only these rows, as `Reader.read` would. Rows ascend; there is at least one row and one column."""
        ...


UnitRanges = Callable[[Unit], "Sequence[Range]"]
"""Returns the byte ranges to read for a row group. Thread-safe; may read a little itself. Raises what `Reader.read`
raises.
"""


@runtime_checkable
class Ranged(Protocol):
    """A format that knows the byte ranges of a row group's columns, so that they can be prefetched."""

    def ranges(self, source: Source, file: DataFile, columns: Sequence[str], version: str) -> UnitRanges:
        """Return a function to the bytes that `Reader.read` of these columns will request, and perhaps more.

        Raises what `Reader.read` raises.
        """
        ...


@runtime_checkable
class PagedRanged(Ranged, Protocol):
    """The same for some rows of row groups, as `PagedReader` reads them."""

    def page_ranges(
        self,
        source: Source,
        file: DataFile,
        columns: Sequence[str],
        version: str,
        rows: Mapping[int, Sequence[Rows]],
    ) -> UnitRanges:
        """Return a function to the byte ranges of these rows; `rows` is keyed by row group index."""
        ...


@runtime_checkable
class Together(Protocol):
    """A format that inspects many files faster than one after the other."""

    def inspect_all(
        self, source: Source, files: Sequence[DataFile], *, columns: Sequence[str] | None, with_nulls: Sequence[bool]
    ) -> list[FileFacts | DataError | StorageError]:
        """Return for each file what `Format.inspect` returns or raises; `with_nulls` has one entry per file."""
        ...


@runtime_checkable
class Headed(Protocol):
    """A format that can decode the first rows of a row group without the others."""

    def read_head(self, reader: Reader, unit: Unit, columns: Sequence[str], num_rows: int) -> pa.Table:
        """Return the first rows, as `Reader.read` of this format's reader would. There is at least one column."""
        ...


@runtime_checkable
class Guessing(Protocol):
    """A format whose files do not state their schema, so it is guessed from the beginning of a file."""

    @property
    def is_keyed(self) -> bool:
        """Whether records name their fields, so that a file may have columns that do not occur at its beginning."""
        ...

    def informed(self, *, decided: Collection[str], is_chosen: bool) -> Format:
        """Return a copy that knows what the user decided.

        `decided` holds the columns whose types the user passed; `is_chosen` states whether the user named the columns
        to deliver.
        """
        ...


@runtime_checkable
class Sampled(Protocol):
    """A format whose rows are samples that may lack parts (tar shards)."""

    def requiring(self, parts: Sequence[str]) -> Format:
        """Return a copy for which only samples with all of these parts are rows."""
        ...


def is_keyed(format: Format) -> bool:
    return isinstance(format, Guessing) and format.is_keyed


class Format(Protocol):
    """A file format. Stateless and thread-safe."""

    @property
    def name(self) -> str: ...

    @property
    def unit_name(self) -> str:
        """The format's own term for a row group: row group, stripe, record batch, byte range."""
        ...

    @property
    def is_typed(self) -> bool:
        """Whether files state the types of their columns. Those of text are guessed."""
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
        """Return the metadata of a file, reading as little as possible.

        Args:
            columns: The columns whose bytes and nulls are counted; None counts all. Unknown names are ignored.
            unit_bytes: The approximate size of row groups where the format leaves it open (text).
            with_nulls: Whether to count nulls even where that takes time.

        Raises:
            DataFileInvalid: The file is damaged or has another format; the message states which.
            DataFileMissing, StorageError: See `Reader.read`.
        """
        ...

    def presence(
        self, source: Source, file: DataFile, facts: FileFacts, condition: Node, schema: pa.Schema
    ) -> list[Presence]:
        """Return what the statistics of each row group decide about a filter (`pruning.py`). SOME is always correct.

        `schema` holds the filter's columns, under the names in the file, with the types in which rows are compared.
        These types represent every value of the file exactly.
        """
        ...

    def open(self, source: Source, file: DataFile, schema: pa.Schema, version: str) -> Reader:
        """Open a file. `schema` gives the types where the format does not; `version` is the one that was planned."""
        ...
