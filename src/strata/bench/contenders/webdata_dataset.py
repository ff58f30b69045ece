"""Not a contender: generates every dataset of the benchmark before anything is measured; later runs reuse them."""

from __future__ import annotations

import json
import os

from strata.bench.contenders.webdata_consumer import MEGA, SIZES, images, tars, text


def main() -> None:
    datasets = [*map(tars, SIZES), images(), text()]
    os.sync()  # so that the next contender does not wait for the disk
    size_bytes = sum(path.stat().st_size for shards in datasets for path in shards.paths)
    print(json.dumps({"figures": {"shards_mb": size_bytes / MEGA}}))


if __name__ == "__main__":
    main()
