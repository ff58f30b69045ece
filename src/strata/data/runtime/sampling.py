"""What must be read before the first epoch: the values of coded columns, the width of rows, and their lengths.

`make_deliverer` is the only part of creating a loader that decodes rows. Rank 0 does it for all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from strata.data.arrow_types import is_list, plain
from strata.data.batch.columns import ArrowColumn, Chunk
from strata.data.batch.conversion import Converter, vocabulary_values
from strata.data.batch.delivery import (
    Deliverer,
    decide_policies,
    delivered_nulls,
    delivered_schema,
    estimate_row_bytes,
    has_variable_width,
)
from strata.data.batch.vocabulary import Vocabulary, from_bytes, to_bytes
from strata.data.order.bins import MAX_ROWS
from strata.data.plan import cache as survey_cache
from strata.data.plan.lengths import RowLengths, choose_columns, count_lengths
from strata.data.plan.surveyor import format_key
from strata.data.runtime.decoder import ThreadDecoder, has_head
from strata.data.runtime.metrics import WorkerRecorder
from strata.errors import (
    DataError,
    DataFileInvalid,
    DataFileMissing,
    InvalidArgument,
    LimitExceeded,
    NoData,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from strata.data.batch.policy import Policy
    from strata.data.config import LoaderConfig, OnError, SizeConfig
    from strata.data.plan.plan import Plan
    from strata.data.runtime.decoder import Recipe

T = TypeVar("T")

_LENGTHS_VERSION = 1
NUM_SAMPLES = 4
"""Row groups whose first rows are decoded to measure the width of rows."""
SAMPLE_ROWS = 4096


def make_deliverer(
    recipe: Recipe,
    config: LoaderConfig,
    share: Callable[[Callable[[], bytes]], bytes] = lambda produce: produce(),
) -> Deliverer:
    """Decide the types of all columns, and read what that needs.

    `share` runs a function on rank 0 and returns its result on all ranks. All ranks call it once.
    """
    plan, batch = recipe.plan, config.batch
    vocabularies: dict[str, Vocabulary] = {
        name: values if isinstance(values, Vocabulary) else Vocabulary.given(name, values, batch.max_vocabulary)
        for name, values in (batch.vocabularies or {}).items()
    }
    policies: tuple[Policy, ...] | None = None
    if recipe.transform is None:
        policies = decide_policies(batch, delivered_schema(plan), delivered_nulls(plan))
    size = config.order.size
    length_columns = () if size is None else choose_columns(delivered_schema(plan), size.unit, size.length_column)
    missing = [policy for policy in policies or () if policy.is_coded and policy.name not in vocabularies]

    def sample() -> bytes:
        found = find_vocabularies(
            recipe,
            missing,
            num_threads=config.runtime.num_threads,
            max_vocabulary=batch.max_vocabulary,
            on_error=config.plan.on_error,
        )
        chooses_lanes = config.order.shuffle and config.order.lanes is None
        width = (
            measure_row_bytes(recipe, policies, {**vocabularies, **found})
            if chooses_lanes
            else estimate_row_bytes(plan)
        )
        lengths = b"" if size is None else find_lengths(recipe, config, length_columns)
        cut = _columns_to_cut(recipe, config, length_columns, lengths)
        return msgspec.msgpack.encode((to_bytes(found.values()), width, lengths, cut))

    # Called even if nothing is missing: a rank with other arguments must not wait for a broadcast that never comes.
    values, row_bytes, packed, cut = msgspec.msgpack.decode(share(sample), type=tuple[bytes, int, bytes, list[str]])
    shared = from_bytes(values)
    for policy in missing:
        if policy.name not in shared:
            raise DataError(
                f"column {policy.name!r} is delivered as codes on this rank but not on rank 0; give all ranks the same "
                "arguments"
            )
        vocabularies[policy.name] = shared[policy.name]
    lengths = None if size is None else RowLengths.from_bytes(length_columns, packed, plan.num_rows)
    return Deliverer(
        plan,
        batch,
        policies,
        vocabularies,
        row_bytes=row_bytes,
        lengths=lengths,
        max_length=None if size is None or lengths is None else _checked_limit(size, plan, lengths),
        cut_columns=cut,
    )


def measure_row_bytes(
    recipe: Recipe, policies: tuple[Policy, ...] | None, vocabularies: Mapping[str, Vocabulary]
) -> int:
    """Return the bytes of a decoded row; for types of variable width, measured on the first rows of some row groups.

    The bytes read are a poor measure: a string of a hundred characters takes one or two bytes in a dictionary.
    """
    plan = recipe.plan
    if not plan.num_units or not has_variable_width(plan):
        return estimate_row_bytes(plan)
    convert = Converter(policies, vocabularies).convert if policies else None
    widths = [
        _bytes_per_row(_as_chunk(table) if convert is None else convert(table, plan.describe(number)), unit_rows)
        for number, table, unit_rows in _samples(recipe)
    ]
    return max(1, round(max(widths))) if widths else estimate_row_bytes(plan)


def _samples(recipe: Recipe) -> Iterator[tuple[int, pa.Table, int]]:
    """Yield the first rows of a few row groups across the plan, before the transform, and the rows of each row group.

    If first rows cannot be read alone, one small row group is decoded instead. Unreadable ones are ignored: delivery
    reports them.
    """
    plan = recipe.plan
    plain = replace(recipe, transform=None)
    spread = np.unique(np.linspace(0, plan.num_units - 1, NUM_SAMPLES).astype(np.int64)).tolist()
    heads = [number for number in spread if has_head(plain, number)]
    numbers = heads or [min(spread, key=lambda number: int(plan.unit_bytes[number]))]
    decoder = ThreadDecoder(plain, WorkerRecorder(0))
    try:
        for number in numbers:
            unit_rows = int(plan.unit_rows[number])
            with contextlib.suppress(DataError, StorageError):
                if heads:
                    yield number, decoder.decode_head(number, min(SAMPLE_ROWS, unit_rows)), unit_rows
                else:
                    yield number, decoder.decode(number), unit_rows
    finally:
        decoder.close()


def _as_chunk(table: pa.Table) -> Chunk:
    """Return the columns as they are: a transform must show its columns before there are policies."""
    return Chunk({name: ArrowColumn(table[name].combine_chunks()) for name in table.column_names}, table.num_rows)


def _bytes_per_row(chunk: Chunk, unit_rows: int) -> float:
    """Return the bytes of a row, in a row group that has each dictionary once."""
    total = 0.0
    for column in chunk.unpack().columns.values():
        kind = column.array.type if isinstance(column, ArrowColumn) else None
        if isinstance(column, ArrowColumn) and pa.types.is_dictionary(kind):
            total += column.array.indices.nbytes / chunk.num_rows + column.array.dictionary.nbytes / unit_rows
        else:
            total += column.nbytes / chunk.num_rows
    return total


def find_vocabularies(
    recipe: Recipe, policies: Sequence[Policy], *, num_threads: int, max_vocabulary: int, on_error: OnError
) -> dict[str, Vocabulary]:
    """Return all values of these columns, by reading only them, once."""
    if not policies:
        return {}
    columns = tuple(dict.fromkeys(policy.path[0] for policy in policies))

    def collect(_: int, table: pa.Table) -> dict[str, Vocabulary]:
        return {p.name: Vocabulary.found(p.name, vocabulary_values(p, table), max_vocabulary) for p in policies}

    found = _read_all(recipe, columns, collect, num_threads=num_threads, on_error=on_error)
    return {
        p.name: Vocabulary.merge(p.name, [part[p.name] for part in found if part is not None], max_vocabulary)
        for p in policies
    }


def find_lengths(recipe: Recipe, config: LoaderConfig, columns: tuple[str, ...]) -> bytes:
    """Return the lengths of all rows as `RowLengths.to_bytes`, from the cache, or by reading these columns once.

    Raises:
        LimitExceeded: The dataset has too many rows.
    """
    plan, size = recipe.plan, config.order.size
    assert size is not None
    if plan.num_rows > MAX_ROWS:
        raise LimitExceeded(
            f"{size.option}= keeps the length of every row, for up to {MAX_ROWS:,} rows, and the dataset has "
            f"{plan.num_rows:,}; read fewer files or rows at once, or use batch_size="
        )
    cache = survey_cache.default() if config.plan.cache else None
    key = _lengths_key(recipe, size.unit, columns)
    if cache is not None and (known := cache.load_bytes(key)) is not None:
        with contextlib.suppress(DataError):
            RowLengths.from_bytes(columns, known, plan.num_rows)
            return known

    def count(number: int, table: pa.Table) -> npt.NDArray[np.uint32]:
        return count_lengths(table, columns, size.unit, plan.describe(number))

    found = _read_all(recipe, columns, count, num_threads=config.runtime.num_threads, on_error=config.plan.on_error)
    values = np.zeros(plan.num_rows, np.uint32)
    starts = np.cumsum(plan.unit_rows) - plan.unit_rows
    for start, part in zip(starts.tolist(), found, strict=True):
        if part is not None:  # the rows of an unreadable row group are left out of their batches
            values[start : start + len(part)] = part
    data = RowLengths(columns, values).to_bytes()
    if cache is not None and all(part is not None for part in found):
        cache.save_bytes(key, data)
    return data


def _columns_to_cut(recipe: Recipe, config: LoaderConfig, columns: tuple[str, ...], lengths: bytes) -> list[str]:
    """Return the columns whose lists are cut together: the one with the lengths, and those as long in every row."""
    plan, size = recipe.plan, config.order.size
    if size is None or size.unit != "tokens" or size.long_rows != "truncate":
        return []
    values = RowLengths.from_bytes(columns, lengths, plan.num_rows).values
    if not _are_lists(plan, columns) or not (values > size.limit).any():
        return list(columns)
    lists = [field.name for field in delivered_schema(plan) if is_list(plain(field.type))]

    def is_as_long(name: str) -> bool:
        found = RowLengths.from_bytes((name,), find_lengths(recipe, config, (name,)), plan.num_rows)
        return np.array_equal(found.values, values)

    return [*columns, *(name for name in lists if name not in columns and is_as_long(name))]


def _lengths_key(recipe: Recipe, unit: str, columns: Sequence[str]) -> str:
    """Return the cache key of lengths: a hash of what decides the rows, their values and how they are counted."""
    plan = recipe.plan
    fields = [(name, str(plan.schema.field(name).type)) for name in columns]
    formats = sorted(map(format_key, recipe.formats.values()))
    parts = [_LENGTHS_VERSION, plan.fingerprint, unit, fields, formats]
    return f"{xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(parts))}-lengths"


def _checked_limit(size: SizeConfig, plan: Plan, lengths: RowLengths) -> int | None:
    """Return the length that lists are cut to, or None if none is too long or they are left out.

    Raises:
        InvalidArgument: A row is longer than a batch, and `long_rows` does not decide what to do with it.
        NoData: All rows are longer than a batch, and are left out.
    """
    too_long = lengths.values > size.limit
    num_long = int(np.count_nonzero(too_long))
    if size.long_rows == "truncate" and (size.unit != "tokens" or not _are_lists(plan, lengths.columns)):
        raise InvalidArgument(
            f"long_rows='truncate' cuts lists of tokens, and the length of a row is that of "
            f"{', '.join(lengths.columns)} in {size.unit}; use long_rows='skip', or batch_tokens= with a list "
            "column as length_column=",
            field="long_rows",
        )
    if not num_long:
        return None
    if size.long_rows == "raise":
        row = int(np.argmax(too_long))
        ends = np.cumsum(plan.unit_rows)
        unit = int(np.searchsorted(ends, row, side="right"))
        within = row - int(ends[unit] - plan.unit_rows[unit])
        raise InvalidArgument(
            f"{num_long:,} of {plan.num_rows:,} rows are longer than {size.option}={size.limit:,}; the longest has "
            f"{int(lengths.values.max()):,} {size.unit}, and the first is row {within} of {plan.describe(unit)}. Raise "
            f"{size.option}=, or pass long_rows='skip' to leave them out"
            + (" or 'truncate' to cut them" if size.unit == "tokens" and _are_lists(plan, lengths.columns) else ""),
            field=size.option,
        )
    if size.long_rows == "skip" and num_long == plan.num_rows:
        raise NoData(
            f"all {num_long:,} rows are longer than {size.option}={size.limit:,} and long_rows='skip' leaves them out; "
            f"raise {size.option}="
        )
    return size.limit if size.long_rows == "truncate" else None


def _are_lists(plan: Plan, columns: Sequence[str]) -> bool:
    return all(is_list(plain(plan.schema.field(name).type)) for name in columns)


def _read_all(
    recipe: Recipe,
    columns: tuple[str, ...],
    collect: Callable[[int, pa.Table], T],
    *,
    num_threads: int,
    on_error: OnError,
) -> list[T | None]:
    """Call `collect` with every row group, reading only these columns; None for one that is unreadable and skipped."""
    narrow = replace(recipe, plan=replace(recipe.plan, columns=columns), transform=None)
    local = threading.local()
    decoders: list[ThreadDecoder] = []

    def read(number: int) -> T | None:
        if not hasattr(local, "decoder"):
            local.decoder = ThreadDecoder(narrow, WorkerRecorder(0))
            decoders.append(local.decoder)
        try:
            table = local.decoder.decode(number)
        except (DataFileInvalid, DataFileMissing):
            if on_error == "raise":
                raise
            return None  # delivery counts it
        return collect(number, table)

    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="strata-data-sample") as threads:
            return list(_bounded_map(threads, read, range(recipe.plan.num_units), 4 * num_threads))
    finally:
        for decoder in decoders:
            decoder.close()


def _bounded_map(
    threads: ThreadPoolExecutor, work: Callable[[int], Any], numbers: Sequence[int], ahead: int
) -> Iterator[Any]:
    waiting = [threads.submit(work, number) for number in numbers[:ahead]]
    for number in range(len(numbers)):
        yield waiting.pop(0).result()
        if number + ahead < len(numbers):
            waiting.append(threads.submit(work, numbers[number + ahead]))
