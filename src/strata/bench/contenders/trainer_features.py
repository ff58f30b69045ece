"""Strata: fit the features of a data set in one pass over its files."""

from __future__ import annotations

import json
import sys
import time

from strata.bench.contenders.trainer_features_data import DENSE, SPARSE, data_path
from strata.trainer.features import DenseFeat, Features, SparseFeat


def main() -> None:
    path = data_path(is_quick="--quick" in sys.argv)
    columns: list[SparseFeat | DenseFeat] = [*map(SparseFeat, SPARSE), *map(DenseFeat, DENSE)]
    Features.fit(str(path), columns[:1])  # imports and page cache
    began_s = time.perf_counter()
    found = Features.fit(str(path), columns)
    taken_s = time.perf_counter() - began_s
    num_ids = sum(field.num_ids for field in found.fields)
    if num_ids < len(SPARSE):
        raise RuntimeError(f"the features have {num_ids} ids")
    print(json.dumps({"figures": {"features_s": taken_s}}))


if __name__ == "__main__":
    main()
