"""The limits: reading the bytes of the shards, walking their headers, and the JPEG decoder alone; and tarfile.

*Raw read*: each file in order, into one buffer that is used again. *Header walk*: the shards are mapped, and only the
size field of each header is read; nothing is verified or copied. *Decoder*: Pillow decodes JPEGs that are in memory
already, in as many threads as Strata uses, and throws the images away.
"""

from __future__ import annotations

import json
import mmap
import statistics
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from strata.bench.contenders.webdata_consumer import (
    MEGA,
    NUM_WORKERS,
    REPETITIONS,
    SIZES,
    batch_size,
    images,
    mb_per_s,
    tars,
)
from strata.bench.tar_files import LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from strata.bench.tar_files import Shards

BLOCK_BYTES = 512
BUFFER_BYTES = 1 << 20
DECODED_AT_ONCE = 16
"""Images of one task, so that tasks cost nothing."""


def read_raw(shards: Shards) -> None:
    buffer = bytearray(BUFFER_BYTES)
    for path in shards.paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def walk_headers(shards: Shards) -> int:
    """Return the number of members."""
    found = 0
    for path in shards.paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            place = 0
            while view[place]:  # the end marker is zeros
                num_bytes = int(view[place + 124 : place + 135], 8)
                place += BLOCK_BYTES + -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
                found += 1
    return found


def tarfile_batches(shards: Shards) -> Iterator[dict[str, list[bytes]]]:
    batch: dict[str, list[bytes]] = {shards.part: [], LABEL: []}
    for path in shards.paths:
        with tarfile.open(path, "r|") as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                batch[member.name.partition(".")[2]].append(file.read())
                if len(batch[shards.part]) == len(batch[LABEL]) == batch_size():
                    yield batch
                    batch = {shards.part: [], LABEL: []}
    yield batch


def decoded_per_s(shards: Shards) -> float:
    """Return the images per second of the decoder alone."""
    encoded = [payload for batch in tarfile_batches(shards) for payload in batch[shards.part]]
    groups = [encoded[first : first + DECODED_AT_ONCE] for first in range(0, len(encoded), DECODED_AT_ONCE)]

    def decode(group: list[bytes]) -> None:
        for data in group:
            with Image.open(BytesIO(data)) as image:
                np.asarray(image)

    with ThreadPoolExecutor(NUM_WORKERS) as threads:
        return len(encoded) / typical_s(lambda: list(threads.map(decode, groups)))


def typical_s(act: Callable[[], Any]) -> float:
    """Return the median time after a first call that does not count."""
    taken = []
    for _ in range(REPETITIONS + 1):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def main() -> None:
    figures: dict[str, float] = {}
    for size in SIZES:
        shards = tars(size)
        megabytes = shards.num_payload_bytes / MEGA
        if walk_headers(shards) != 2 * shards.num_samples:
            raise ValueError(f"the shards do not have two members for each of {shards.num_samples:,} samples")
        figures |= {
            f"raw_{size}_mb_per_s": megabytes / typical_s(lambda shards=shards: read_raw(shards)),  # type: ignore[misc]
            f"walk_{size}_mb_per_s": megabytes / typical_s(lambda shards=shards: walk_headers(shards)),  # type: ignore[misc]
            f"tarfile_{size}_mb_per_s": mb_per_s(lambda shards=shards: tarfile_batches(shards), shards),  # type: ignore[misc]
        }
    figures["decoder_images_per_s"] = decoded_per_s(images())
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
