"""Strata: all columns in file order, shuffled, in smaller batches; 2 of 66 columns; and memory.

Loaders use defaults except for the batch size, the number of decode threads and `shuffle`; one shuffles with a buffer
that is larger than `split_bytes`. Memory is measured in separate passes, because sampling takes time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from strata import StructuredDataset
from strata.bench.contenders.data_consumer import (
    NUM_WORKERS,
    PeakPss,
    batch_size,
    num_rows,
    pass_s,
    pss_mb,
    rows_per_s,
)
from strata.bench.data_files import PROJECTED, table, wide

if TYPE_CHECKING:
    from strata.bench.data_files import Files

SMALL_BATCH_SIZE = 1_024
SHUFFLE_BUFFER_SIZE = 100_000
LARGE_BUFFER_SIZE = 1_000_000
"""More than 200 MB, so that row groups are dealt to several blocks."""
SPLIT_BYTES = 128 << 20
ROW_BYTES = 8 + 13 * 4 + 13 * 4 + 13 * 8 + 1
PROJECTION_TIMES = 8
"""Two columns are read so fast that the files are linked several times until a pass takes long enough to be timed."""


def projected() -> Files:
    return wide(num_rows(), times=PROJECTION_TIMES)


def loader_of(files: Files, **arguments: Any) -> tuple[Any, Any]:
    """Return a loader and its dataset."""
    chosen: dict[str, Any] = {"batch_size": batch_size(), "num_workers": NUM_WORKERS, "output_format": "torch"}
    return StructuredDataset.create_dataloader(str(files.directory), "parquet", **(chosen | arguments))


def measured_rows_per_s(files: Files, *, num_columns: int | None = None, **arguments: Any) -> float:
    loader, dataset = loader_of(files, **arguments)
    try:
        return rows_per_s(lambda: loader, files, num_columns=num_columns)
    finally:
        dataset.close()


def measured_pss_mb(files: Files, **arguments: Any) -> tuple[float, float]:
    """Return the memory with a loader before its first batch, and the peak memory of a pass."""
    loader, dataset = loader_of(files, **arguments)
    try:
        before_mb = pss_mb()
        with PeakPss() as peak:
            pass_s(lambda: loader, files)
        return before_mb, peak.peak_mb
    finally:
        dataset.close()


def main() -> None:
    files = table(num_rows())
    base_mb, plain_mb = measured_pss_mb(files)
    _, shuffled_mb = measured_pss_mb(files, shuffle=True)
    allowed_mb = (SHUFFLE_BUFFER_SIZE * ROW_BYTES + 2 * SPLIT_BYTES * NUM_WORKERS) / 1e6
    figures = {
        "peak_pss_mb": max(plain_mb, shuffled_mb),
        "base_pss_mb": base_mb,
        "pss_over_allowed": (max(plain_mb, shuffled_mb) - base_mb) / allowed_mb,
        "rows_per_s": measured_rows_per_s(files),
        "shuffled_rows_per_s": measured_rows_per_s(files, shuffle=True),
        "large_buffer_rows_per_s": measured_rows_per_s(files, shuffle=True, shuffle_buffer_size=LARGE_BUFFER_SIZE),
        "small_batches_rows_per_s": measured_rows_per_s(files, batch_size=SMALL_BATCH_SIZE),
        "projection_rows_per_s": measured_rows_per_s(projected(), num_columns=len(PROJECTED), columns=list(PROJECTED)),
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
