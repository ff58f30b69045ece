"""What statistics of row groups say about a filter: pyarrow's own judgement, and what it leaves out.

It is asked of a footer: the file's own, or one in which every row group stands for a few rows (`parquet_pages.py`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from strata.data.formats.base import Presence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow.parquet as pq

MAX_FLOAT_COLUMNS = 3
"""In a filter; each multiplies by four the cases that statistics are asked about."""


@dataclass(frozen=True, slots=True, eq=False)
class Stated:
    """Row groups, and what is stated of them."""

    data: bytes
    """The end of a file, with the whole footer."""
    metadata: pq.FileMetaData
    schema: pa.Schema
    leaves: Mapping[str, int]
    """Of the filter's columns, none of which is nested."""


def is_nested(kind: pa.DataType) -> bool:
    return kind.num_fields > 0 or isinstance(kind, pa.BaseExtensionType)


def can_tell(schema: pa.Schema, columns: Sequence[str]) -> bool:
    """Whether the least and the greatest value of these columns say all that a filter may ask."""
    kinds = [schema.field(name).type for name in columns]
    plain = all(
        not is_nested(kind) and not pa.types.is_dictionary(kind) and not pa.types.is_float16(kind) for kind in kinds
    )
    return plain and sum(map(pa.types.is_floating, kinds)) <= MAX_FLOAT_COLUMNS


def presence(stated: Stated, condition: pc.Expression) -> list[Presence]:
    """For every row group. The filter uses the columns that have leaves."""
    num_groups = stated.metadata.num_row_groups
    floats = [name for name in stated.leaves if pa.types.is_floating(stated.schema.field(name).type)]
    try:
        possible = _groups_that_may_pass(stated, condition, floats)
        # Not `~condition` alone: a condition can be null of itself, and then neither it nor its inverse is true.
        doubtful = _groups_that_may_pass(stated, ~condition | condition.is_null(), floats)
    except (pa.ArrowException, TypeError):  # not to be answered by statistics; evaluating it will say why
        return [Presence.SOME] * num_groups
    never_null = _groups_without_nulls(stated)
    return [
        Presence.NONE
        if index not in possible
        else Presence.ALL
        if index in never_null and index not in doubtful
        else Presence.SOME
        for index in range(num_groups)
    ]


def _groups_without_nulls(stated: Stated) -> set[int]:
    found = set()
    for index in range(stated.metadata.num_row_groups):
        group = stated.metadata.row_group(index)
        statistics = [group.column(leaf).statistics for leaf in stated.leaves.values()]
        if all(each is not None and each.has_null_count and each.null_count == 0 for each in statistics):
            found.add(index)
    return found


def _groups_that_may_pass(stated: Stated, condition: pc.Expression, floats: Sequence[str]) -> set[int]:
    """Row groups in which statistics do not rule out that a row passes.

    Statistics of floats do not tell all: they are silent about NaN, which every comparison but `!=` is false for, and
    they do not tell the two zeros apart, as `is_in` does. So for each way in which a row may have such values in these
    columns, the question is asked with that known.
    """
    # Imported late: it takes 20 ms, and only filters need it.
    import pyarrow.dataset as pads  # noqa: PLC0415

    everywhere = set(range(stated.metadata.num_row_groups))
    with_zeros = {name: _groups_with_zeros(stated, name) for name in floats}
    found: set[int] = set()
    for case in itertools.product((None, math.nan, 0.0, -0.0), repeat=len(floats)):
        groups = everywhere
        known = pc.scalar(True)
        for name, value in zip(floats, case, strict=True):
            if value is not None:
                known &= pc.field(name) == pa.scalar(value, stated.schema.field(name).type)
            if value == 0:
                groups = groups & with_zeros[name]
        if groups <= found:
            continue
        fragment = pads.ParquetFileFormat().make_fragment(pa.BufferReader(stated.data), partition_expression=known)
        found |= groups.intersection(_ids(fragment.split_by_row_group(condition, stated.schema)))
    return found


def _groups_with_zeros(stated: Stated, name: str) -> set[int]:
    """Where a float column may have a zero."""
    leaf = stated.leaves[name]
    found = set()
    for index in range(stated.metadata.num_row_groups):
        statistics = stated.metadata.row_group(index).column(leaf).statistics
        # NaN, which some writers state as least and greatest, says nothing.
        if statistics is None or not statistics.has_min_max or not (statistics.min > 0 or statistics.max < 0):
            found.add(index)
    return found


def _ids(fragments: Sequence[object]) -> Iterator[int]:
    for fragment in fragments:
        for group in fragment.row_groups:  # type: ignore[attr-defined]
            yield group.id
