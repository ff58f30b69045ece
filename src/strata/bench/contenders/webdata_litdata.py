"""LitData with its own format, with two workers and with none. Runs in the peers' environment without Strata.

`optimize` writes the samples before, outside the timing: the payload and the label of each.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.append(str(Path(__file__).parent))
CHUNK_BYTES = "64MB"


def samples_of(path: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of a shard; `optimize` calls it in another process."""
    tar_files = importlib.import_module("webdata_consumer").tar_files
    with tarfile.open(path, "r|") as tar:
        payload = b""
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            if member.name.endswith(tar_files.LABEL):  # follows the payload
                yield {tar_files.BYTES: payload, tar_files.LABEL: int(file.read())}
            else:
                payload = file.read()


def main() -> None:
    os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
    logging.disable(logging.WARNING)
    try:
        litdata = importlib.import_module("litdata")
    except ImportError:
        print(json.dumps({"not_installed": "litdata"}))
        return
    common = importlib.import_module("webdata_consumer")
    version = metadata.version("litdata")
    figures: dict[str, float] = {}
    for size in common.SIZES:
        shards = common.peer_tars(size)

        def optimize(target: Path, shards: Any = shards) -> None:
            inputs = list(map(str, shards.paths))
            litdata.optimize(
                samples_of, inputs, output_dir=str(target), chunk_bytes=CHUNK_BYTES, num_workers=1, verbose=False
            )

        name = f"litdata-{version}-tar-{size}-{shards.num_samples}"
        directory = common.tar_files.data_files.kept(name, optimize)
        common.data_consumer.warm(directory)

        def loader_of(num_workers: int, directory: Path = directory) -> Any:
            dataset = litdata.StreamingDataset(str(directory))
            return litdata.StreamingDataLoader(dataset, batch_size=common.batch_size(), num_workers=num_workers)

        figures[f"litdata_{size}_mb_per_s"] = max(
            common.mb_per_s_once(lambda num=num: loader_of(num), shards) for num in (0, common.NUM_WORKERS)
        )
    print(json.dumps({"figures": figures, "versions": {"litdata": version}}))


if __name__ == "__main__":
    main()
