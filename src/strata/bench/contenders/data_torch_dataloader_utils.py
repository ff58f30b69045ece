"""torch-dataloader-utils with the same settings as Strata. Runs in the peers' environment without Strata.

Measured with two worker processes, as many as Strata has decode threads, and with none, where pyarrow's threads decode
and the consumer's process does the rest.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
NAME = "torch-dataloader-utils"
FILES_WITH_WORKERS = 2
"""Files read of the 8, because with worker processes a pass over all would take half a minute."""


def main() -> None:
    try:
        package = importlib.import_module("torch_dataloader_utils")
    except ImportError:
        print(json.dumps({"not_installed": NAME}))
        return
    common = importlib.import_module("data_consumer")

    def loader_of(files: Any, num_workers: int) -> Any:
        loader, _ = package.StructuredDataset.create_dataloader(
            str(files.directory),
            "parquet",
            batch_size=common.batch_size(),
            num_workers=num_workers,
            output_format="torch",
        )
        return loader

    files = common.data_files.table(common.num_rows())
    some = common.data_files.table_again(common.num_rows(), FILES_WITH_WORKERS)
    inline, with_workers = loader_of(files, 0), loader_of(some, common.NUM_WORKERS)
    figures = {
        "tdu_inline_rows_per_s": common.rows_per_s(lambda: inline, files),
        "tdu_2_workers_rows_per_s": common.rows_per_s_once(lambda: with_workers, some),
    }
    figures["tdu_rows_per_s"] = max(figures.values())
    print(json.dumps({"figures": figures, "versions": {NAME: metadata.version(NAME)}}))


if __name__ == "__main__":
    main()
