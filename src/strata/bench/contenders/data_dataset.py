"""Not a contender: generates every dataset of the benchmark before anything is measured; later runs reuse them."""

from __future__ import annotations

import json
import os

from strata.bench.contenders import data_strata, data_strata_growth, data_strata_start
from strata.bench.contenders.data_consumer import num_rows
from strata.bench.data_files import table


def main() -> None:
    files = table(num_rows())
    data_strata.projected()
    data_strata_start.thousand()
    data_strata_start.ten_thousand()
    data_strata_growth.small()
    data_strata_growth.large()
    os.sync()  # so that the next contender does not wait for the disk
    size_bytes = sum(path.stat().st_size for path in files.paths)
    print(json.dumps({"figures": {"dataset_mb": size_bytes / 1e6}}))


if __name__ == "__main__":
    main()
