"""Strata: whether more data lowers the throughput or needs more memory.

The large dataset has links to the same files, 50 times as many rows; the small one is read repeatedly. Memory is
measured in separate passes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from strata.bench.contenders.data_consumer import PeakPss, num_rows, pass_s
from strata.bench.contenders.data_strata import loader_of
from strata.bench.data_files import table_again

if TYPE_CHECKING:
    from strata.bench.data_files import Files

SMALL_FILES = 2
LARGE_FILES = 100
SMALL_PASSES = 10
PSS_INTERVAL_S = 0.1


def small() -> Files:
    return table_again(num_rows(), SMALL_FILES)


def large() -> Files:
    return table_again(num_rows(), LARGE_FILES)


def measure(files: Files, *, num_passes: int) -> tuple[float, float]:
    """Return throughput and peak memory; the pass for memory comes first and is the warm-up."""
    loader, dataset = loader_of(files)
    try:
        with PeakPss(interval_s=PSS_INTERVAL_S) as peak:
            pass_s(lambda: loader, files)
        taken_s = sum(pass_s(lambda: loader, files) for _ in range(num_passes))
        return num_passes * files.num_rows / taken_s, peak.peak_mb
    finally:
        dataset.close()


def main() -> None:
    small_rows_per_s, small_mb = measure(small(), num_passes=SMALL_PASSES)
    large_rows_per_s, large_mb = measure(large(), num_passes=1)
    figures = {
        "growth_rows_per_s_ratio": large_rows_per_s / small_rows_per_s,
        "growth_peak_pss_ratio": large_mb / small_mb,
        "growth_small_rows_per_s": small_rows_per_s,
        "growth_large_rows_per_s": large_rows_per_s,
        "growth_small_peak_pss_mb": small_mb,
        "growth_large_peak_pss_mb": large_mb,
    }
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
