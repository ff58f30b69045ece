"""The plan: what will be read. It is made from one survey of the dataset; everything after it is arithmetic.

A file consists of row groups (`formats/base.py`). Consecutive row groups of one file form a *split*, the unit that a
shuffle permutes. Rows are counted as they are delivered: after deletes and after the filter. A row group without such
rows is not in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from strata.data.formats.base import Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa
    import pyarrow.compute as pc
    from rich.table import Table

    from strata.data.formats.base import Rows
    from strata.data.source.source import DataFile


class Projection(Protocol):
    """Turns the columns of one file into those of the dataset: names, types, constants, deleted rows. Picklable."""

    def file_columns(self, columns: Sequence[str]) -> list[str]:
        """Return which columns of the file to read for these columns of the dataset."""
        ...

    def apply(self, table: pa.Table, row_group: Unit, columns: Sequence[str]) -> pa.Table:
        """Return these columns in this order with the types of the dataset, without deleted rows."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of which the plan reads rows."""

    file: DataFile
    format: str
    version: str
    schema: pa.Schema
    """The schema of the file, not of the dataset."""
    projection: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What the plan leaves out, and why. `strata data plan --json` prints these fields; a unit is a row group."""

    num_files: int = 0
    num_files_pruned: int = 0
    """Files not opened, because of their partition values or the metadata of an Iceberg table."""
    num_units: int = 0
    """Row groups of the opened files."""
    num_units_pruned: int = 0
    """Row groups pruned by statistics, or of which no row passed when they were counted."""
    num_units_counted: int = 0
    """Row groups whose filter columns were decoded to count the rows that pass."""
    num_units_in_part: int = 0
    """Row groups of which only some pages are read, because page statistics rule out the others."""
    num_pages: int = 0
    """Pages of the columns that are read, in these row groups."""
    num_pages_pruned: int = 0
    bytes_pages_pruned: int = 0
    num_rows: int = 0
    """Rows of the opened files, before the filter."""
    bytes_total: int = 0
    """Size of the opened files, with all columns."""
    bytes_planned: int = 0
    """Bytes that an epoch reads."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Unreadable data left out by on_error="skip": the name of the file, and the reason."""
    num_files_skipped: int = 0
    """Files skipped as a whole; their number of rows is unknown."""
    num_units_skipped: int = 0
    """Row groups skipped in other files; how many of their rows pass the filter is unknown."""
    num_rows_incomplete: int = 0
    """Samples of tar shards that missing="skip" leaves out, because they lack a part."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What an epoch reads, the same on every rank. Print it for a table of splits."""

    files: tuple[PlannedFile, ...]
    unit_file: npt.NDArray[np.int64]
    """The file of a row group. This and the following arrays have one entry per row group, in the order of files and
    of row groups within them."""
    unit_index: npt.NDArray[np.int64]
    unit_rows: npt.NDArray[np.int64]
    """Rows to deliver, after deletes and the filter; at least 1."""
    unit_total_rows: npt.NDArray[np.int64]
    unit_first_row: npt.NDArray[np.int64]
    unit_offset: npt.NDArray[np.int64]
    unit_bytes: npt.NDArray[np.int64]
    split_starts: npt.NDArray[np.int64]
    """Split i consists of the row groups from `split_starts[i]` up to, not including, `split_starts[i + 1]`."""
    schema: pa.Schema
    """The schema of the dataset: delivered columns and those that only the filter needs, with unified types."""
    columns: tuple[str, ...]
    """The delivered columns."""
    condition: pc.Expression | None
    condition_columns: tuple[str, ...]
    condition_text: str
    """The filter as readable text; empty without one."""
    null_counts: Mapping[str, int]
    """A lower bound for the nulls of delivered columns, before the filter; a missing column may have any number."""
    fingerprint: str
    """A hash of all that decides the row order: names and versions of files, rows per row group, splits, filter."""
    pruning: Pruning = field(default_factory=Pruning)
    parts: npt.NDArray[np.int64] | None = None
    """The ranges of rows to read in row groups that are read in part: one line (row group, first row, number of rows)
    per range, in order. The other rows do not pass the filter, so this changes what is read but not what is delivered.
    """

    @property
    def num_rows(self) -> int:
        return int(self.unit_rows.sum())

    @property
    def num_units(self) -> int:
        return len(self.unit_rows)

    @property
    def num_splits(self) -> int:
        return len(self.split_starts) - 1

    def __rich__(self) -> Table:
        from strata.data.plan.report import as_table  # noqa: PLC0415 - only for printing

        return as_table(self)

    def __str__(self) -> str:
        from rich.console import Console  # noqa: PLC0415

        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def describe(self, number: int) -> str:
        """Return the file, index and first row of a row group, for messages."""
        row_group = self.unit(number)
        name = self.files[int(self.unit_file[number])].file.name
        return f"{name}, row group {row_group.index} (from row {row_group.first_row})"

    def parts_of(self, number: int) -> list[Rows]:
        """Return the ranges of rows to read in a row group; an empty list means all rows."""
        if self.parts is None:
            return []
        first, last = np.searchsorted(self.parts[:, 0], [number, number + 1])
        return [(row, num_rows) for _, row, num_rows in self.parts[first:last].tolist()]

    def unit(self, number: int) -> Unit:
        """Return a row group as its format describes it, including deleted and filtered rows."""
        return Unit(
            index=int(self.unit_index[number]),
            num_rows=int(self.unit_total_rows[number]),
            first_row=int(self.unit_first_row[number]),
            offset=int(self.unit_offset[number]),
            num_bytes=int(self.unit_bytes[number]),
        )
