"""From a unit's rows to what the user receives: types decided once, applied by every worker."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from strata.data.batch.arrow_columns import ArrowColumn
from strata.data.batch.columns import Chunk
from strata.data.batch.conversion import Converter, vocabulary_values
from strata.data.batch.output import Presenter
from strata.data.batch.policy import decide
from strata.data.batch.vocabulary import Vocabulary, from_bytes, to_bytes
from strata.data.runtime.decoder import ThreadDecoder, has_head, where
from strata.data.runtime.metrics import WorkerRecorder
from strata.errors import (
    DataError,
    DataFileInvalid,
    DataFileMissing,
    InvalidArgument,
    StorageError,
    TransformFailed,
)
from strata.lifecycle import renewed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from strata.data.batch.policy import Policy
    from strata.data.config import LoaderConfig
    from strata.data.plan.plan import Plan
    from strata.data.runtime.decoder import Recipe

VARIABLE_BYTES = 32
"""What a value without a fixed width is taken to occupy at least, when memory is estimated."""
GROWTH = 3
"""How much larger rows are decoded than read, where nobody knows better: what Parquet makes of strings and numbers."""
NUM_MEASURED = 4
"""Units whose first rows are decoded to find out how wide rows are."""
MEASURED_ROWS = 4096


class Deliverer:
    """Can be used by several threads at once.

    With a transform nobody knows the columns before it has run, so they are decided when the first unit comes out of
    it; otherwise before anything is read.

    `share`: how rank 0 hands bytes to the others, who then need not make them. All ranks call it, once.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: LoaderConfig,
        share: Callable[[Callable[[], bytes]], bytes] = lambda produce: produce(),
    ) -> None:
        self._plan = recipe.plan
        self._config = config.batch
        self._is_transformed = recipe.transform is not None
        self._lock = renewed(threading.Lock())
        self._made: tuple[tuple[Policy, ...], Converter, Presenter] | None = None
        self.vocabularies: dict[str, Vocabulary] = {
            name: values
            if isinstance(values, Vocabulary)
            else Vocabulary.given(name, values, config.batch.max_vocabulary)
            for name, values in (config.batch.vocabularies or {}).items()
        }
        policies: tuple[Policy, ...] = ()
        if not self._is_transformed:
            policies = self._decide(delivered_schema(recipe.plan), _null_counts(recipe.plan))
        missing = [policy for policy in policies if policy.is_coded and policy.name not in self.vocabularies]

        def find() -> bytes:
            found = find_vocabularies(
                recipe,
                missing,
                num_threads=config.runtime.num_threads,
                max_values=config.batch.max_vocabulary,
                skips_bad_units=config.plan.on_error == "skip",
            )
            self.vocabularies |= found
            chooses_lanes = config.order.shuffle and config.order.lanes is None
            width = self._measure(recipe, policies) if chooses_lanes else row_bytes(recipe.plan)
            return msgspec.msgpack.encode((to_bytes(found.values()), width))

        # Also when nothing is missing: a rank that was given other arguments must not wait for what nobody sends.
        values, self.row_bytes = msgspec.msgpack.decode(share(find), type=tuple[bytes, int])
        """About how much a delivered row takes, the same on all ranks: it decides the number of lanes."""
        shared = from_bytes(values)
        for policy in missing:
            if policy.name not in shared:
                raise DataError(
                    f"column {policy.name!r} is delivered as codes here, and not on rank 0; give all ranks the same "
                    "arguments"
                )
            self.vocabularies[policy.name] = shared[policy.name]
        if not self._is_transformed:
            self._made = self._make(policies)

    @property
    def policies(self) -> tuple[Policy, ...] | None:
        """What becomes of each column; None until a transform has shown them."""
        return None if self._made is None else self._made[0]

    def convert(self, number: int, table: pa.Table) -> Chunk:
        made = self._made
        if made is None:
            with self._lock:
                if self._made is None:
                    self._made = self._make(self._decide(table.schema, {}))
                made = self._made
        if self._is_transformed:
            self._check_columns(table, made[0], number)
        return made[1].convert(table, where(self._plan, number)).pack()

    def present(self, chunk: Chunk, sizes: Sequence[int]) -> list[Any]:
        assert self._made is not None, "a chunk comes from convert"
        return self._made[2].present(chunk, sizes)

    def _check_columns(self, table: pa.Table, policies: Sequence[Policy], number: int) -> None:
        """Batches must not depend on which unit came out of the transform first."""
        known = {policy.path[0] for policy in policies}
        if known != set(table.column_names):
            odd = sorted(known ^ set(table.column_names))
            raise TransformFailed(
                f"transform gave columns {sorted(table.column_names)} for {where(self._plan, number)}, and "
                f"{sorted(known)} for another unit (they differ in {odd[0]!r}); give back the same columns always"
            )

    def _measure(self, recipe: Recipe, policies: tuple[Policy, ...]) -> int:
        """How wide rows are once they are decoded, where types do not tell: by the first rows of some units.

        The bytes that are read say little: a string of a hundred characters that a dictionary holds takes one or two.
        """
        plan = recipe.plan
        if not plan.num_units or not _varies(plan):
            return row_bytes(plan)
        convert = Converter(policies, self.vocabularies).convert if policies else None
        widths = [
            _bytes_per_row(_as_chunk(table) if convert is None else convert(table, where(plan, number)), unit_rows)
            for number, table, unit_rows in _some_rows(recipe)
        ]
        return max(1, round(max(widths))) if widths else row_bytes(plan)

    def _make(self, policies: tuple[Policy, ...]) -> tuple[tuple[Policy, ...], Converter, Presenter]:
        for policy in policies:
            if policy.is_coded and policy.name not in self.vocabularies:
                raise InvalidArgument(
                    f"column {policy.name!r} comes out of transform, so its values are not known before it has run; "
                    f"give them: vocabularies={{{policy.name!r}: [...]}}",
                    field="vocabularies",
                )
        converter = Converter(policies, self.vocabularies, is_private=not self._is_transformed)
        return policies, converter, Presenter(self._config.output_format, policies)

    def _decide(self, schema: pa.Schema, null_counts: Mapping[str, int]) -> tuple[Policy, ...]:
        config = self._config
        return decide(
            schema,
            null_counts,
            output_format=config.output_format,
            strings=config.strings,
            string_width=config.string_width,
            nulls=config.nulls,
            decimals=config.decimals,
        )


def delivered_schema(plan: Plan) -> pa.Schema:
    return pa.schema([plan.schema.field(name) for name in plan.columns])


def lanes_that_fit(plan: Plan, row_bytes: int, budget_bytes: int, at_most: int) -> int:
    """How many decoded units a rank may hold at once: a lane has one, and the next is being decoded."""
    return max(1, min(at_most, budget_bytes // (int(plan.unit_rows.max(initial=1)) * row_bytes)))


def row_bytes(plan: Plan) -> int:
    """About how much a delivered row takes; at least 1. Where widths vary, how much is read of a row says more."""
    widths = _widths(plan)
    known = sum(VARIABLE_BYTES if width is None else width for width in widths)
    if None in widths and plan.num_units:
        known = max(known, GROWTH * int(plan.unit_bytes.sum()) // max(1, int(plan.unit_total_rows.sum())))
    return max(1, known)


def _widths(plan: Plan) -> list[int | None]:
    return [_width_bytes(field.type) for field in delivered_schema(plan)]


def _varies(plan: Plan) -> bool:
    """Whether types leave open how wide rows are."""
    return None in _widths(plan)


def _some_rows(recipe: Recipe) -> Iterator[tuple[int, pa.Table, int]]:
    """The first rows of a few units all over the plan, before the transform; and how many rows each unit has.

    Of a small unit where the first rows cannot be had alone. What cannot be read is met again when it is delivered.
    """
    plan = recipe.plan
    plain = replace(recipe, transform=None)
    spread = np.unique(np.linspace(0, plan.num_units - 1, NUM_MEASURED).astype(np.int64)).tolist()
    heads = [number for number in spread if has_head(plain, number)]
    numbers = heads or [min(spread, key=lambda number: int(plan.unit_bytes[number]))]
    decoder = ThreadDecoder(plain, WorkerRecorder(0))
    try:
        for number in numbers:
            unit_rows = int(plan.unit_rows[number])
            with contextlib.suppress(DataError, StorageError):
                if heads:
                    yield number, decoder.decode_head(number, min(MEASURED_ROWS, unit_rows)), unit_rows
                else:
                    yield number, decoder.decode(number), unit_rows
    finally:
        decoder.close()


def _as_chunk(table: pa.Table) -> Chunk:
    """Without policies, which a transform must show first."""
    return Chunk({name: ArrowColumn(table[name].combine_chunks()) for name in table.column_names}, table.num_rows)


def _bytes_per_row(chunk: Chunk, unit_rows: int) -> float:
    """In a unit of so many rows: it has a dictionary once."""
    total = 0.0
    for column in chunk.unpack().columns.values():
        kind = column.array.type if isinstance(column, ArrowColumn) else None
        if isinstance(column, ArrowColumn) and pa.types.is_dictionary(kind):
            total += column.array.indices.nbytes / chunk.num_rows + column.array.dictionary.nbytes / unit_rows
        else:
            total += column.nbytes / chunk.num_rows
    return total


def _null_counts(plan: Plan) -> Mapping[str, int]:
    """Of what is delivered. They were counted before deletes and filter, which may leave out the rows with nulls."""
    return plan.null_counts if plan.condition is None and (plan.unit_rows == plan.unit_total_rows).all() else {}


def find_vocabularies(
    recipe: Recipe, policies: Sequence[Policy], *, num_threads: int, max_values: int, skips_bad_units: bool
) -> dict[str, Vocabulary]:
    """All values of these columns, by reading them alone, once."""
    if not policies:
        return {}
    columns = tuple(dict.fromkeys(policy.path[0] for policy in policies))
    narrow = replace(recipe, plan=replace(recipe.plan, columns=columns), transform=None)
    local = threading.local()
    decoders: list[ThreadDecoder] = []

    def look(number: int) -> dict[str, Vocabulary]:
        if not hasattr(local, "decoder"):
            local.decoder = ThreadDecoder(narrow, WorkerRecorder(0))
            decoders.append(local.decoder)
        try:
            table = local.decoder.decode(number)
        except (DataFileInvalid, DataFileMissing):
            if not skips_bad_units:
                raise
            return {}  # counted when it is met again, on delivery
        return {p.name: Vocabulary.found(p.name, vocabulary_values(p, table), max_values) for p in policies}

    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="strata-data-vocabulary") as threads:
            found = list(_bounded_map(threads, look, range(recipe.plan.num_units), 4 * num_threads))
    finally:
        for decoder in decoders:
            decoder.close()
    return {p.name: Vocabulary.merge(p.name, [part[p.name] for part in found if part], max_values) for p in policies}


def _bounded_map(
    threads: ThreadPoolExecutor, work: Callable[[int], Any], numbers: Sequence[int], ahead: int
) -> Iterator[Any]:
    waiting = [threads.submit(work, number) for number in numbers[:ahead]]
    for number in range(len(numbers)):
        yield waiting.pop(0).result()
        if number + ahead < len(numbers):
            waiting.append(threads.submit(work, numbers[number + ahead]))


def _width_bytes(kind: pa.DataType) -> int | None:
    """Of one value; None if they are not all of one width."""
    if isinstance(kind, pa.BaseExtensionType):
        return _width_bytes(kind.storage_type)
    if pa.types.is_dictionary(kind):  # as wide as its values, once these are put in the place of its codes
        return _width_bytes(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        each = _width_bytes(kind.value_type)
        return None if each is None else kind.list_size * each
    if pa.types.is_struct(kind):
        parts = [_width_bytes(field.type) for field in kind]
        return None if None in parts else sum(part or 0 for part in parts)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return None
