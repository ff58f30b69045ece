"""What will be read: the result of looking at a dataset once, from which everything else is arithmetic.

Files consist of units (`formats/base.py`); consecutive units of one file are packed into *splits*, which are what a
shuffle permutes. Rows are counted as they will be delivered: after deletes and after the filter. Units without such
rows are not in a plan.
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


class Fit(Protocol):
    """How one file's columns become the dataset's: names, types, constants, deleted rows. Can be pickled."""

    def file_columns(self, columns: Sequence[str]) -> list[str]:
        """Which columns of the file to read for these columns of the dataset."""
        ...

    def apply(self, table: pa.Table, unit: Unit, columns: Sequence[str]) -> pa.Table:
        """From what was read: these columns in this order, with the dataset's types; deleted rows are left out."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedFile:
    file: DataFile
    format: str
    version: str
    schema: pa.Schema
    """Of the file itself."""
    fit: Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What the plan left out, and why."""

    num_files: int = 0
    num_files_pruned: int = 0
    """By partition values or an Iceberg table's metadata: not even opened."""
    num_units: int = 0
    """In the files that were opened."""
    num_units_pruned: int = 0
    """By statistics, or because no row passed when they were counted."""
    num_units_counted: int = 0
    """Whose filter columns had to be decoded to know how many rows pass."""
    num_units_in_part: int = 0
    """Of which statistics of pages rule out so many rows that only the other pages are read."""
    num_pages: int = 0
    """In these units, in columns that are read."""
    num_pages_pruned: int = 0
    bytes_pages_pruned: int = 0
    num_rows: int = 0
    """Before the filter, in the files that were opened."""
    bytes_total: int = 0
    """Of all columns of all files that were opened."""
    bytes_planned: int = 0
    """What an epoch reads."""
    skipped: tuple[tuple[str, str], ...] = ()
    """What could not be read and was to be skipped: the file's name and the reason."""
    num_files_skipped: int = 0
    """As a whole: how many rows they have is not known."""
    num_units_skipped: int = 0
    """Of other files: how many of their rows would have passed is not known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    files: tuple[PlannedFile, ...]
    unit_file: npt.NDArray[np.int64]
    """Which file a unit is in. This and the next: one entry per unit, in the order of files and of units in them."""
    unit_index: npt.NDArray[np.int64]
    unit_rows: npt.NDArray[np.int64]
    """To be delivered: after deletes and filter; above 0."""
    unit_total_rows: npt.NDArray[np.int64]
    unit_first_row: npt.NDArray[np.int64]
    unit_offset: npt.NDArray[np.int64]
    unit_bytes: npt.NDArray[np.int64]
    split_starts: npt.NDArray[np.int64]
    """Split i consists of units `split_starts[i]` up to, not including, `split_starts[i + 1]`."""
    schema: pa.Schema
    """Of the dataset: what is delivered and what only the filter needs, with the types that all files agree on."""
    columns: tuple[str, ...]
    """What is delivered."""
    condition: pc.Expression | None
    condition_columns: tuple[str, ...]
    condition_text: str
    """The filter as a person reads it; empty without one."""
    null_counts: Mapping[str, int]
    """Of delivered columns, before the filter: at least so many. A column that is not named may have any number."""
    fingerprint: str
    """Of all that decides which row is the n-th: names and versions of files, rows per unit, splits, filter."""
    pruning: Pruning = field(default_factory=Pruning)
    parts: npt.NDArray[np.int64] | None = None
    """Of units that are not read whole, which rows are: a line for each stretch, in order, with the unit's number, the
    first row in it and how many. The others do not pass the filter: it makes no difference but in what is read."""

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
        from strata.data.plan.table import table  # noqa: PLC0415 - only people need it

        return table(self)

    def __str__(self) -> str:
        from rich.console import Console  # noqa: PLC0415

        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def parts_of(self, number: int) -> list[Rows]:
        """Which rows of a unit are read; nothing: all."""
        if self.parts is None:
            return []
        first, last = np.searchsorted(self.parts[:, 0], [number, number + 1])
        return [(row, num_rows) for _, row, num_rows in self.parts[first:last].tolist()]

    def unit(self, number: int) -> Unit:
        """As the file's format knows it: all its rows, deleted and filtered ones too."""
        return Unit(
            index=int(self.unit_index[number]),
            num_rows=int(self.unit_total_rows[number]),
            first_row=int(self.unit_first_row[number]),
            offset=int(self.unit_offset[number]),
            num_bytes=int(self.unit_bytes[number]),
        )
