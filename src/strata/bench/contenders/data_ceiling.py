"""The limit of the decoder: pyarrow's Parquet reader in as many threads as Strata uses, and a consumer.

Every thread has its own file handles; footers are read before. A free thread takes the next row group, so row groups
arrive in any order. Columns become tensors without a copy. The consumer touches batches of the same size as all others
deliver, sliced from a row group with one call per column. A second figure touches whole row groups, which is little
more than decoding.

The limit of a shuffle with a large buffer: row groups are collected until the buffer is full, then numpy joins and
permutes one column after the other, in two threads, while the next row groups are decoded. It holds the buffer twice.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.dlpack import from_dlpack

from strata.bench.contenders.data_consumer import NUM_WORKERS, batch_size, num_rows, rows_per_s
from strata.bench.contenders.data_strata import LARGE_BUFFER_SIZE, projected
from strata.bench.data_files import PROJECTED, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

MAX_WAITING = 2 * NUM_WORKERS
"""Decoded row groups that wait for the consumer."""
SEED = 7


class Ceiling:
    """Decodes files in threads, in repeated passes."""

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        self._columns = None if columns is None else list(columns)
        self._footers = [(path, pq.read_metadata(path)) for path in paths]

    def row_groups(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield every row group once, as contiguous tensors."""
        tasks: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        num_tasks = 0
        for number, (_, footer) in enumerate(self._footers):
            for group in range(footer.num_row_groups):
                tasks.put((number, group))
                num_tasks += 1
        made: queue.Queue[pa.Table | Exception] = queue.Queue(MAX_WAITING)
        threads = [threading.Thread(target=self._decode, args=(tasks, made)) for _ in range(NUM_WORKERS)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(num_tasks):
                found = made.get()
                if isinstance(found, Exception):
                    raise found
                yield {name: as_tensor(found[name]) for name in found.column_names}
        finally:
            _join(threads, tasks, made)

    def batches(self, num_rows: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the same rows in batches; the last batch of each row group is smaller."""
        for group in self.row_groups():
            parts = [torch.split(column, num_rows) for column in group.values()]
            for batch in zip(*parts, strict=True):
                yield dict(zip(group, batch, strict=True))

    def shuffled_batches(self, num_rows: int, buffer_rows: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the rows in batches, shuffled within buffers of at least `buffer_rows`."""
        random = np.random.default_rng(SEED)
        groups: list[dict[str, torch.Tensor]] = []
        with ThreadPoolExecutor(NUM_WORKERS) as threads:
            for group in self.row_groups():
                groups.append(group)
                if sum(map(_num_rows, groups)) >= buffer_rows:
                    yield from _shuffle(groups, num_rows, random, threads)
                    groups = []
            if groups:
                yield from _shuffle(groups, num_rows, random, threads)

    def _decode(self, tasks: queue.SimpleQueue[tuple[int, int]], made: queue.Queue[pa.Table | Exception]) -> None:
        handles: dict[int, pq.ParquetFile] = {}
        try:
            while True:
                number, group = tasks.get_nowait()
                if number not in handles:
                    path, footer = self._footers[number]
                    handles[number] = pq.ParquetFile(path, metadata=footer)
                made.put(handles[number].read_row_group(group, columns=self._columns, use_threads=False))
        except queue.Empty:
            return
        except Exception as error:  # noqa: BLE001 (the consumer raises it)
            made.put(error)


def as_tensor(column: pa.ChunkedArray) -> torch.Tensor:
    (chunk,) = column.chunks  # the values of a row group are contiguous
    return from_dlpack(chunk)


def _num_rows(group: Mapping[str, torch.Tensor]) -> int:
    return len(next(iter(group.values())))


def _shuffle(
    groups: Sequence[Mapping[str, torch.Tensor]],
    num_rows: int,
    random: np.random.Generator,
    threads: ThreadPoolExecutor,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield all rows of the row groups in random order, in batches."""
    order = random.permutation(sum(map(_num_rows, groups)))

    def split_column(name: str) -> Sequence[torch.Tensor]:
        joined = np.concatenate([group[name].numpy() for group in groups])
        return torch.split(torch.from_numpy(np.take(joined, order)), num_rows)

    for batch in zip(*threads.map(split_column, groups[0]), strict=True):
        yield dict(zip(groups[0], batch, strict=True))


def _join(threads: Sequence[threading.Thread], *queues: Any) -> None:
    """Join the threads, and discard what is queued: the consumer may have stopped early."""
    for thread in threads:
        while thread.is_alive():
            for each in queues:
                with contextlib.suppress(queue.Empty):
                    each.get_nowait()
            thread.join(0.01)


def main() -> None:
    files, wide = table(num_rows()), projected()
    ceiling, narrow = Ceiling(files.paths), Ceiling(wide.paths, PROJECTED)
    figures = {
        "ceiling_rows_per_s": rows_per_s(lambda: ceiling.batches(batch_size()), files),
        "large_buffer_ceiling_rows_per_s": rows_per_s(
            lambda: ceiling.shuffled_batches(batch_size(), LARGE_BUFFER_SIZE), files
        ),
        "bare_decode_rows_per_s": rows_per_s(ceiling.row_groups, files),
        "projection_ceiling_rows_per_s": rows_per_s(
            lambda: narrow.batches(batch_size()), wide, num_columns=len(PROJECTED)
        ),
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
