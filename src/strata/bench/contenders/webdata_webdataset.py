"""The webdataset package with 0, 2 and 4 workers; the best one counts. Runs in the peers' environment without Strata.

In file order, without its shuffle buffer, and batched in the workers, as its documentation advises. JPEGs are decoded
by its own decoder, which calls Pillow.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
WORKERS = (0, 2, 4)


def main() -> None:
    logging.disable(logging.WARNING)
    try:
        package = importlib.import_module("webdataset")
    except ImportError:
        print(json.dumps({"not_installed": "webdataset"}))
        return
    common = importlib.import_module("webdata_consumer")
    label = common.tar_files.LABEL

    def columns_of(part: str) -> Any:
        def columns(samples: Any) -> dict[str, Any]:
            payloads, labels = zip(*samples, strict=True)
            return {part: payloads, label: labels}

        return columns

    def loader_of(shards: Any, num_workers: int, *, is_decoded: bool = False) -> Any:
        dataset = package.WebDataset(list(map(str, shards.paths)), shardshuffle=False)
        if is_decoded:
            dataset = dataset.decode("rgb8")
        dataset = dataset.to_tuple(shards.part, label)
        dataset = dataset.batched(common.batch_size(), collation_fn=columns_of(shards.part))
        return package.WebLoader(dataset, batch_size=None, num_workers=num_workers)

    figures: dict[str, float] = {}
    for size in common.SIZES:
        shards = common.peer_tars(size)
        found = {
            f"webdataset_{size}_{num}_workers_mb_per_s": common.mb_per_s_once(
                lambda shards=shards, num=num: loader_of(shards, num), shards
            )
            for num in WORKERS
        }
        figures |= found | {f"webdataset_{size}_mb_per_s": max(found.values())}
    images = common.images()
    figures["webdataset_images_per_s"] = max(
        common.samples_per_s_once(lambda num=num: loader_of(images, num, is_decoded=True), images, is_decoded=True)
        for num in WORKERS
    )
    print(json.dumps({"figures": figures, "versions": {"webdataset": metadata.version("webdataset")}}))


if __name__ == "__main__":
    main()
