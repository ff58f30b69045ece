"""LitData with its own format. Runs in the peers' environment without Strata.

`optimize` writes the rows before, outside the timing. A sample is a row, as in its documentation; the dense and the
categorical columns of a row are one array each. Its own loader reads them, with two workers and with none; the better
one counts. Its Parquet loader makes a Python dict of every row and needs polars.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.append(str(Path(__file__).parent))
NUM_FILES = 1
"""Files read of the 8, because every row is a sample."""
CHUNK_BYTES = "64MB"


def rows_of(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one Parquet file; `optimize` calls it in another process."""
    np, pq = importlib.import_module("numpy"), importlib.import_module("pyarrow.parquet")
    data_files = importlib.import_module("data_consumer").data_files
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group)
        ids, labels = table[data_files.ID].to_numpy(), table[data_files.LABEL].to_numpy()
        dense = np.stack([table[name].to_numpy() for name in data_files.DENSE], axis=1)
        categorical = np.stack([table[name].to_numpy() for name in data_files.CATEGORICAL], axis=1)
        for row in range(table.num_rows):
            yield {
                data_files.ID: int(ids[row]),
                "dense": dense[row],
                "categorical": categorical[row],
                data_files.LABEL: int(labels[row]),
            }


def main() -> None:
    os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
    logging.disable(logging.WARNING)
    try:
        litdata = importlib.import_module("litdata")
    except ImportError:
        print(json.dumps({"not_installed": "litdata"}))
        return
    common = importlib.import_module("data_consumer")
    files = common.data_files.table_again(common.num_rows(), NUM_FILES)

    def optimize(target: Path) -> None:
        inputs = [str(path) for path in files.paths]
        litdata.optimize(rows_of, inputs, output_dir=str(target), chunk_bytes=CHUNK_BYTES, num_workers=1, verbose=False)

    name = f"litdata-{metadata.version('litdata')}-{common.num_rows()}-files-{NUM_FILES}"
    directory = str(common.data_files.kept(name, optimize))
    common.warm(Path(directory))

    def measure(num_workers: int) -> float:
        dataset = litdata.StreamingDataset(directory)
        loader = litdata.StreamingDataLoader(dataset, batch_size=common.batch_size(), num_workers=num_workers)
        found: float = common.rows_per_s_once(lambda: loader, files)
        return found

    figures = {
        "litdata_inline_rows_per_s": measure(0),
        "litdata_2_workers_rows_per_s": measure(common.NUM_WORKERS),
    }
    figures["litdata_rows_per_s"] = max(figures.values())
    print(json.dumps({"figures": figures, "versions": {"litdata": metadata.version("litdata")}}))


if __name__ == "__main__":
    main()
