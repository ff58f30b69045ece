"""ORC: the contract, and what is its alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.orc as paorc
from data_format_contract import ALL_COLUMNS, FormatContract

from strata.data.formats.orc import OrcFormat


def _rows(table: pa.Table, first: int, num_rows: int) -> pa.Table:
    """A copy: the writer takes slices of structs from their beginning."""
    return table.take(list(range(first, min(first + num_rows, table.num_rows))))


class TestOrc(FormatContract):
    format = OrcFormat()
    columns = tuple(name for name in ALL_COLUMNS if name != "colour")  # there are no dictionaries

    def write(self, table: pa.Table, path: Path, rows_per_unit: int) -> None:
        with paorc.ORCWriter(path, stripe_size=1, batch_size=rows_per_unit) as writer:
            for first in range(0, max(1, table.num_rows), rows_per_unit):
                writer.write(_rows(table, first, rows_per_unit))

    def as_stored(self, table: pa.Table) -> pa.Table:
        """Times are in nanoseconds."""
        place = table.schema.get_field_index("time")
        return table if place < 0 else table.set_column(place, "time", table["time"].cast(pa.timestamp("ns")))
