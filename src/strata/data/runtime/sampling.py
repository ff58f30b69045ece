"""What must be read before the first epoch: the values of coded columns, and the width of rows.

`make_deliverer` is the only part of creating a loader that decodes rows. Rank 0 does it for all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

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
from strata.data.runtime.decoder import ThreadDecoder, has_head
from strata.data.runtime.metrics import WorkerRecorder
from strata.errors import DataError, DataFileInvalid, DataFileMissing, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from strata.data.batch.policy import Policy
    from strata.data.config import LoaderConfig, OnError
    from strata.data.runtime.decoder import Recipe

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
        return msgspec.msgpack.encode((to_bytes(found.values()), width))

    # Called even if nothing is missing: a rank with other arguments must not wait for a broadcast that never comes.
    values, row_bytes = msgspec.msgpack.decode(share(sample), type=tuple[bytes, int])
    shared = from_bytes(values)
    for policy in missing:
        if policy.name not in shared:
            raise DataError(
                f"column {policy.name!r} is delivered as codes on this rank but not on rank 0; give all ranks the same "
                "arguments"
            )
        vocabularies[policy.name] = shared[policy.name]
    return Deliverer(plan, batch, policies, vocabularies, row_bytes=row_bytes)


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
    narrow = replace(recipe, plan=replace(recipe.plan, columns=columns), transform=None)
    local = threading.local()
    decoders: list[ThreadDecoder] = []

    def collect(number: int) -> dict[str, Vocabulary]:
        if not hasattr(local, "decoder"):
            local.decoder = ThreadDecoder(narrow, WorkerRecorder(0))
            decoders.append(local.decoder)
        try:
            table = local.decoder.decode(number)
        except (DataFileInvalid, DataFileMissing):
            if on_error == "raise":
                raise
            return {}  # delivery counts it
        return {p.name: Vocabulary.found(p.name, vocabulary_values(p, table), max_vocabulary) for p in policies}

    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="strata-data-vocabulary") as threads:
            found = list(_bounded_map(threads, collect, range(recipe.plan.num_units), 4 * num_threads))
    finally:
        for decoder in decoders:
            decoder.close()
    return {
        p.name: Vocabulary.merge(p.name, [part[p.name] for part in found if part], max_vocabulary) for p in policies
    }


def _bounded_map(
    threads: ThreadPoolExecutor, work: Callable[[int], Any], numbers: Sequence[int], ahead: int
) -> Iterator[Any]:
    waiting = [threads.submit(work, number) for number in numbers[:ahead]]
    for number in range(len(numbers)):
        yield waiting.pop(0).result()
        if number + ahead < len(numbers):
            waiting.append(threads.submit(work, numbers[number + ahead]))
