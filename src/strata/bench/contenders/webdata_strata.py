"""Strata: tar shards in file order, shuffled with exact resume, and with JPEG decoding.

The shuffled pass takes a `state_dict` every few batches, as a training does that saves its position. Loaders use two
decode threads, a shuffle buffer of 1,000 samples, which is usual for images, and defaults otherwise.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from strata import StructuredDataset
from strata.bench.contenders.webdata_consumer import (
    NUM_WORKERS,
    SIZES,
    batch_size,
    images,
    images_per_s,
    mb_per_s,
    tars,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.bench.tar_files import Shards

SHUFFLE: dict[str, Any] = {"shuffle": True, "shuffle_buffer_size": 1_000}
BATCHES_PER_STATE = 10


def loader_of(shards: Shards, **arguments: Any) -> tuple[Any, Any]:
    """Return a loader and its dataset; parts stay bytes."""
    chosen: dict[str, Any] = {"batch_size": batch_size(), "num_workers": NUM_WORKERS, "decode": False}
    return StructuredDataset.create_dataloader(list(map(str, shards.paths)), "webdataset", **(chosen | arguments))


def saves_of(loader: Any) -> Callable[[], None]:
    """Return a function to call after each batch, which takes a state from time to time."""
    numbers = itertools.count(1)

    def after_batch() -> None:
        if next(numbers) % BATCHES_PER_STATE == 0:
            loader.state_dict()

    return after_batch


def measured_mb_per_s(shards: Shards, **arguments: Any) -> float:
    loader, dataset = loader_of(shards, **arguments)
    try:
        return mb_per_s(lambda: loader, shards, on_batch=saves_of(loader))
    finally:
        dataset.close()


def decoded_per_s(shards: Shards, **arguments: Any) -> float:
    loader, dataset = loader_of(shards, decode=None, **arguments)
    try:
        return images_per_s(lambda: loader, shards)
    finally:
        dataset.close()


def main() -> None:
    figures = {}
    for size in SIZES:
        shards = tars(size)
        figures[f"plain_{size}_mb_per_s"] = measured_mb_per_s(shards)
        figures[f"shuffled_{size}_mb_per_s"] = measured_mb_per_s(shards, **SHUFFLE)
    figures["decoded_images_per_s"] = decoded_per_s(images(), **SHUFFLE)
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
