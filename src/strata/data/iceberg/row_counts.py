"""How many rows of each unit of a file will be delivered: after deletes, and after the filter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

from strata.data.filter import expression
from strata.data.filter import filter as filters
from strata.data.formats.base import Presence
from strata.data.iceberg.filter import renamed
from strata.data.iceberg.probe import LazyReader
from strata.data.iceberg.projection import IcebergFit
from strata.data.plan.probe import UNREADABLE
from strata.data.plan.schema import keeps_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from strata.data.filter.filter import Condition
    from strata.data.formats.base import Unit
    from strata.data.iceberg.equality_deletes import EqualityDeletes
    from strata.data.iceberg.probe import Looked, Request


@dataclass(frozen=True, slots=True)
class Known:
    """What was counted in another run: it holds if the same rows are deleted."""

    deleted_digest: str
    unit_rows: tuple[int, ...]
    num_units_counted: int


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """One data file, and what it will deliver."""

    looked: Looked
    fit: IcebergFit
    unit_rows: tuple[int, ...]
    """One for each unit; 0 for units that deliver nothing."""
    num_units_counted: int = 0
    """Whose filter columns were decoded."""
    bad_units: tuple[str, ...] = ()
    """Units that could not be read and were to be skipped, with the reason."""

    @property
    def deleted_digest(self) -> str:
        return digest_of(self.fit.deleted)


def digest_of(deleted: npt.NDArray[np.int64]) -> str:
    return str(xxhash.xxh3_128_hexdigest(deleted.astype("<i8").tobytes())) if len(deleted) else ""


def count(
    request: Request,
    looked: Looked,
    positions: npt.NDArray[np.int64],
    equality: EqualityDeletes,
    *,
    wide: bool,
    known: Known | None = None,
) -> Counted:
    """
    Raises:
        SchemaMismatch: The file's columns cannot be read as the table's.
        DataFileInvalid, DataFileMissing: It cannot be read, and is not to be skipped.
        StorageError: Storage cannot be reached, or refuses.
    """
    columns = looked.layout.columns(request.fields, wide=wide)
    bad: dict[int, str] = {}
    if request.condition is None and not looked.scanned.equality_deletes:
        fit = IcebergFit(columns, positions)
        return Counted(looked, fit, tuple(fit.num_left(unit) for unit in looked.facts.units))
    with LazyReader(looked, request.source) as reader:
        gone = [positions]
        if looked.scanned.equality_deletes:
            for unit in looked.facts.units:
                with _Skipping(request, unit, looked, bad):
                    gone.append(equality.gone(looked, unit, reader))
        fit = IcebergFit(columns, np.unique(np.concatenate(gone)) if len(gone) > 1 else positions)
        if request.condition is None:
            rows, num_counted = [fit.num_left(unit) for unit in looked.facts.units], 0
        elif known is not None and known.deleted_digest == digest_of(fit.deleted) and not bad:
            rows, num_counted = list(known.unit_rows), known.num_units_counted
        else:
            rows, num_counted = _filtered(request, request.condition, looked, fit, reader, bad)
    told = [0 if unit.index in bad else num for unit, num in zip(looked.facts.units, rows, strict=True)]
    return Counted(looked, fit, tuple(told), num_counted, tuple(bad.values()))


class _Skipping:
    """A unit that cannot be read delivers nothing, if such are to be skipped."""

    def __init__(self, request: Request, unit: Unit, looked: Looked, bad: dict[int, str]) -> None:
        self._skips = request.skips
        self._unit = unit
        self._looked = looked
        self._bad = bad

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not self._skips or not isinstance(error, UNREADABLE):
            return False
        self._bad[self._unit.index] = f"{self._looked.format.unit_name} {self._unit.index}: {error}"
        return True


def _filtered(
    request: Request, condition: Condition, looked: Looked, fit: IcebergFit, reader: LazyReader, bad: dict[int, str]
) -> tuple[list[int], int]:
    rows, num_counted = [], 0
    for unit, presence in zip(looked.facts.units, _presence(request, condition, looked, fit), strict=True):
        num_left = fit.num_left(unit) if presence != Presence.NONE and unit.index not in bad else 0
        if presence == Presence.SOME and num_left:
            num_counted += 1
            with _Skipping(request, unit, looked, bad):
                table = reader.read(unit, fit.file_columns(condition.columns))
                place = f"{looked.file.name}, {looked.format.unit_name} {unit.index}"
                num_left = filters.count(condition, fit.apply(table, unit, condition.columns), place)
        rows.append(num_left)
    return rows, num_counted


def _presence(request: Request, condition: Condition, looked: Looked, fit: IcebergFit) -> Sequence[Presence]:
    """What is known of the units without decoding: from what is constant in the file, then from statistics."""
    facts = looked.facts
    if not facts.units:
        return []
    tree = expression.decode(condition.expression)
    absent = [name for name in condition.columns if fit.columns[name].source is None]
    if absent:
        one_row = replace(facts.units[0], num_rows=1)
        left = expression.resolve(tree, IcebergFit(fit.columns).apply(pa.table({}), one_row, absent))[0]
        if left.node is None:
            return [left.presence] * len(facts.units)
        tree = left.node
    names = expression.columns(tree)
    if not all(_keeps_values(facts.schema, fit, name) for name in names):
        return [Presence.SOME] * len(facts.units)
    sources = {name: str(fit.columns[name].source) for name in names}
    types = {sources[name]: fit.columns[name].recipe.type for name in names}
    schema = pa.schema(sorted(types.items()))
    return looked.format.presence(request.source, looked.file, facts, renamed(tree, sources), schema)


def _keeps_values(schema: pa.Schema, fit: IcebergFit, name: str) -> bool:
    """Whether the file's values are the table's: no unit of time is cut off, nothing is taken out of a struct."""
    column = fit.columns[name]
    return column.is_plain and keeps_values(schema.field(column.source).type, column.recipe.type)
