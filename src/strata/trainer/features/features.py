"""`Features`: feature columns that are fitted once, saved with the model, and applied identically everywhere."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from strata.data.config import MAX_DEFAULT_WORKERS
from strata.errors import InvalidArgument, NoData, SchemaMismatch
from strata.trainer.features import portable
from strata.trainer.features.columns import check_declarations, check_passthrough
from strata.trainer.features.encoding import (
    Column,
    DenseColumn,
    SparseColumn,
    VarLenColumn,
    column_from_state,
    rows_array,
    side_by_side,
)
from strata.trainer.features.fitters import Fitter, make_fitter
from strata.trainer.features.report import table
from strata.trainer.features.scan import Reading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from strata.trainer.features.columns import Declaration
    from strata.trainer.features.field import Field
    from strata.trainer.features.scan import Observer


@dataclass(frozen=True, repr=False, eq=False)
class Features:
    """Fitted feature columns: they encode batches of raw columns, and describe the result to a model.

    Ids: 0 is missing or padding, 1 is unknown, known values start at 2. An encoded batch has the columns

    - `sparse`: the ids of all sparse features, a fixed-size list of int64 in the order of `fields`;
    - `dense`: the scaled numbers of all dense features, a fixed-size list of float32;
    - one column per list feature, with its name: a fixed-size list of int64, padded with 0;
    - the columns to pass through, unchanged.

    `sparse` or `dense` is left out if there are no such features. Features are immutable, and can be pickled.
    """

    columns: tuple[Column, ...]
    num_rows: int
    """Rows that the features were fitted on."""
    passthrough: tuple[str, ...] = ()
    """Columns that `encode` delivers unchanged where a batch has them: the label, weights."""
    fields: tuple[Field, ...] = field(init=False)
    """One per feature, in the order of the declarations: all that a model needs to know."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(column.field for column in self.columns))

    @classmethod
    def fit(
        cls,
        data: Any,
        columns: Sequence[Declaration],
        *,
        label: str | None = None,
        passthrough: Sequence[str] = (),
        filters: Any = None,
        format: str | None = None,  # noqa: A002 - as in strata.data
        storage_options: Mapping[str, Any] | None = None,
        num_workers: int | None = None,
        show_progress: bool = False,
        loader_options: Mapping[str, Any] | None = None,
    ) -> Features:
        """Fit features in one streaming pass over all rows.

        The result depends on the rows only, not on their order, the files, or the number of threads. Memory is
        bounded by the vocabularies and the row groups being decoded.

        Args:
            data: A path, directory, glob pattern or URL, or a list of these; or a pyarrow Table or RecordBatch, a
                DataFrame, or a mapping from column names to arrays, lists or tensors.
            columns: The features: `SparseFeat`, `DenseFeat` and `VarLenFeat`.
            label: A column that `encode` delivers unchanged, and that must not be a feature.
            passthrough: More columns to deliver unchanged, such as weights.
            filters: Rows to fit on, as in `StructuredDataset.create_dataloader`.
            format: The format of the files; by default it is guessed.
            storage_options: Credentials and settings for object stores.
            num_workers: Decode threads; by default one per core, up to 8.
            show_progress: Whether to show a progress bar on stderr.
            loader_options: More arguments of `StructuredDataset.create_dataloader`, such as `schema`.

        Raises:
            InvalidArgument: A declaration is invalid.
            SchemaMismatch: A column does not exist, its type does not fit its declaration, or it has no values.
            LimitExceeded: A column has too many distinct values for a vocabulary.
            NoData, DataError, StorageError: The data cannot be read.
        """
        passed = (*([] if label is None else [label]), *passthrough)
        check_declarations(columns, passed)
        names = [column.name for column in columns]
        fitters: list[Fitter] = []
        reading = Reading(
            columns=[*names, *dict.fromkeys(passed)],
            filters=filters,
            format=format,
            storage_options=storage_options,
            num_workers=num_workers,
            show_progress=show_progress,
            loader_options=loader_options or {},
        )

        def bind(schema: pa.Schema) -> Observer:
            fitters.extend(make_fitter(column, schema.field(column.name).type) for column in columns)
            return observe

        observed: list[int] = []

        def observe(batch: pa.RecordBatch) -> None:
            observed.append(batch.num_rows)
            for name, fitter in zip(names, fitters, strict=True):
                fitter.observe(batch.column(name))

        num_rows = reading.observe_all(data, bind)
        assert sum(observed) == num_rows, "every row group is decoded once"
        if not num_rows:
            raise NoData("there are no rows to fit features on; check the path and filters=")
        with ThreadPoolExecutor(MAX_DEFAULT_WORKERS) as threads:  # sorting vocabularies releases the interpreter lock
            fitted = tuple(threads.map(lambda fitter: fitter.finish(), fitters))
        return cls(fitted, num_rows, tuple(dict.fromkeys(passed)))

    @property
    def columns_read(self) -> list[str]:
        """The raw columns that `encode` needs and passes through: `columns=` of a loader."""
        return [*(column.name for column in self.columns), *self.passthrough]

    def with_passthrough(self, *names: str) -> Features:
        """Return the same features that also deliver these columns unchanged, instead of the present ones."""
        check_passthrough([column.name for column in self.columns], names)
        return replace(self, passthrough=tuple(dict.fromkeys(names)))

    def encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Encode raw columns; pass it to a loader as `transform=`, and `columns_read` as `columns=`.

        Columns of the batch that are neither features nor passed through are dropped. A column to pass through that
        the batch does not have is left out, because rows to predict have no label.

        Raises:
            SchemaMismatch: A feature's column is missing or has another type than the fitted one.
        """
        raw = {name: batch.column(place) for place, name in enumerate(batch.schema.names)}
        missing = [column.name for column in self.columns if column.name not in raw]
        if missing:
            raise SchemaMismatch(
                f"the batch has no column {missing[0]!r}, which the features need; its columns are: "
                f"{', '.join(raw) or 'none'}"
            )
        made: dict[str, pa.Array] = {}
        sparse = [column for column in self.columns if isinstance(column, SparseColumn)]
        dense = [column for column in self.columns if isinstance(column, DenseColumn)]
        if sparse:
            ids = [column.encode(raw[column.name]) for column in sparse]
            made["sparse"] = side_by_side(ids, [1] * len(ids), pa.int64())
        if dense:
            numbers = [column.encode(raw[column.name]) for column in dense]
            made["dense"] = side_by_side(numbers, [column.width for column in dense], pa.float32())
        for column in self.columns:
            if isinstance(column, VarLenColumn):
                made[column.name] = rows_array(column.encode(raw[column.name]), pa.int64())
        made |= {name: raw[name] for name in self.passthrough if name in raw}
        return pa.RecordBatch.from_arrays(list(made.values()), names=list(made))

    def portable(self) -> portable.PortableEncoder:
        """Return the encoder of exported models, which needs only torch."""
        return portable.PortableEncoder.from_state(self.state())

    # Saving

    def state(self) -> dict[str, Any]:
        """Return all that was fitted, as plain data for JSON."""
        return {
            "format": portable.FORMAT,
            "version": portable.VERSION,
            "num_rows": self.num_rows,
            "passthrough": list(self.passthrough),
            "columns": [column.state() for column in self.columns],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Features:
        """Restore features from what `state` returned.

        Raises:
            InvalidArgument: It is not such a state, or a newer one; the message names the entry.
        """
        try:
            portable.check_state(state)
            num_rows, passthrough = state.get("num_rows"), state.get("passthrough")
            if type(num_rows) is not int or not isinstance(passthrough, list):
                raise ValueError("the features have no 'num_rows' or 'passthrough'; pass the whole state")  # noqa: TRY301
            columns = tuple(column_from_state(entry) for entry in state["columns"])
        except (ValueError, OverflowError, pa.ArrowException) as error:
            raise InvalidArgument(str(error), field="state") from error
        return cls(columns, num_rows, tuple(passthrough))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a JSON file, which appears only when it is complete."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(self.state(), allow_nan=False), encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Features:
        """Read the file that `save` wrote.

        Raises:
            InvalidArgument: `Features.save` did not write the file; the message gives the reason.
        """
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidArgument(
                f"{os.fspath(path)} is not JSON ({error}); pass a file that Features.save wrote", field="path"
            ) from error
        return cls.from_state(state)

    def __repr__(self) -> str:
        return table(self.columns, self.num_rows)
