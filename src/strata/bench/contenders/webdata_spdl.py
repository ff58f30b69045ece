"""SPDL: `iter_tarfile`, in its fastest ways. Runs in the peers' environment without Strata.

Shards are read into memory and their members are views of it; or shards are mapped, and members are copied; or two
threads of its pipeline read and parse shards, as in its example for WebDataset. The best one counts. It has no shuffle
and no resume. The pipeline decodes JPEGs with Pillow in two threads.
"""

from __future__ import annotations

import importlib
import json
import mmap
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

sys.path.append(str(Path(__file__).parent))
MAX_WAITING = 8
"""Batches that wait for the consumer."""


def grouped(members: Iterable[tuple[str, Any]], parts: Sequence[str], num_samples: int) -> Iterator[dict[str, Any]]:
    """Group the members of one shard into samples by key, and samples into batches of columns."""
    batch: dict[str, list[Any]] = {part: [] for part in parts}
    current, num = "", 0
    for name, data in members:
        key, _, part = name.partition(".")
        if key != current:
            if num == num_samples:
                yield batch
                batch, num = {each: [] for each in parts}, 0
            current, num = key, num + 1
        batch[part].append(data)
    yield batch


def main() -> None:
    try:
        io = importlib.import_module("spdl.io")
        pipeline = importlib.import_module("spdl.pipeline")
    except ImportError:
        print(json.dumps({"not_installed": "spdl"}))
        return
    common = importlib.import_module("webdata_consumer")
    label = common.tar_files.LABEL

    def read(path: Path, part: str) -> Iterator[dict[str, Any]]:
        batches = grouped(io.iter_tarfile(path.read_bytes()), (part, label), common.batch_size())
        return (batch | {label: list(map(bytes, batch[label]))} for batch in batches)

    def mapped(path: Path, part: str) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        members = ((name, bytes(data)) for name, data in io.iter_tarfile(view))
        return grouped(members, (part, label), common.batch_size())

    def piped(shards: Any, decode: Any = None) -> Iterator[dict[str, Any]]:
        builder = pipeline.PipelineBuilder().add_source(shards.paths)
        builder = builder.pipe(lambda path: list(read(path, shards.part)), concurrency=common.NUM_WORKERS)
        builder = builder.disaggregate()
        if decode is not None:
            builder = builder.pipe(decode, concurrency=common.NUM_WORKERS)
        made = builder.add_sink(MAX_WAITING).build(num_threads=common.NUM_WORKERS)
        with made.auto_stop():
            yield from made

    def in_turn(way: Any, shards: Any) -> Iterator[dict[str, Any]]:
        for path in shards.paths:
            yield from way(path, shards.part)

    figures: dict[str, float] = {}
    for size in common.SIZES:
        shards = common.tars(size)
        found = {
            f"spdl_{size}_read_mb_per_s": common.mb_per_s(lambda shards=shards: in_turn(read, shards), shards),
            f"spdl_{size}_mapped_mb_per_s": common.mb_per_s(lambda shards=shards: in_turn(mapped, shards), shards),
            f"spdl_{size}_pipeline_mb_per_s": common.mb_per_s(lambda shards=shards: piped(shards), shards),
        }
        figures |= found | {f"spdl_{size}_mb_per_s": max(found.values())}
    decoder = pillow(common.tar_files)
    if decoder is not None:
        images = common.images()
        figures["spdl_images_per_s"] = common.images_per_s(lambda: piped(images, decoder), images)
    print(json.dumps({"figures": figures, "versions": {"spdl": metadata.version("spdl")}}))


def pillow(tar_files: Any) -> Any:
    """Return a function that decodes the images of a batch, or None without Pillow."""
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError:
        return None
    io, np = importlib.import_module("io"), importlib.import_module("numpy")

    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        arrays = [np.asarray(image.open(io.BytesIO(data))) for data in batch[tar_files.IMAGE]]
        return batch | {tar_files.IMAGE: np.stack(arrays)}

    return decode


if __name__ == "__main__":
    main()
