"""Strata: time to resume, to jump to a random sample, and to index many shards.

Everything is imported before. The cache of file metadata is cold, the shards have the indexes that `strata data index`
writes, and the first batch is compared with the expected one. The many shards are links to those with samples of
100 kB, without indexes; reading them is a pass of the loader over all of them, with its plan made before.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import strata.data.torch  # noqa: F401 (otherwise imported on first use)
from strata.bench import data_files
from strata.bench.contenders.data_consumer import setting
from strata.bench.contenders.data_strata_start import nothing_remembered
from strata.bench.contenders.webdata_consumer import SIZES, tars
from strata.bench.contenders.webdata_limits import read_raw
from strata.bench.contenders.webdata_strata import SHUFFLE, loader_of
from strata.bench.tar_files import LABEL
from strata.data.indexer import index_shards

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.bench.tar_files import Shards

SHARE = 0.9
"""Share of an epoch after which a state is saved."""
NUM_JUMPS = 20
SEED = 7


def resuming_s(shards: Shards, **arguments: Any) -> tuple[float, float]:
    """Return the time from the constructor to the batch after `SHARE` of an epoch, with and without indexes.

    Raises:
        ValueError: It is not the expected batch.
    """
    loader, dataset = loader_of(shards, **arguments)
    num_done, state, expected = int(SHARE * len(loader)), None, None
    for number, batch in enumerate(loader, start=1):
        if state is not None:
            expected = list(batch[LABEL])
            break
        if number == num_done:
            state = loader.state_dict()
    dataset.close()
    if expected is None:
        raise ValueError(f"{len(loader)} batches are too few to stop at {SHARE:.0%} of them; use more samples")
    taken_s = []
    for is_indexed in (True, False):
        with nothing_remembered(), links(shards, len(shards.paths)) as linked:
            if is_indexed:
                index_shards(list(map(str, linked.paths)))
            start = time.perf_counter()
            loader, dataset = loader_of(linked, **arguments)
            loader.load_state_dict(state)
            batches = iter(loader)  # kept, because releasing it waits for its threads
            found = list(next(batches)[LABEL])
            taken_s.append(time.perf_counter() - start)
            dataset.close()
        if found != expected:
            raise ValueError(f"the batch after the resume has the labels {found[:5]}, not {expected[:5]}")
    return taken_s[0], taken_s[1]


def jumping_s(shards: Shards) -> float:
    """Return the mean time until an open loader delivers a random sample, in file order with batches of one.

    Raises:
        ValueError: It is another sample.
    """
    loader, dataset = loader_of(shards, batch_size=1)
    state = loader.state_dict()
    places = random.Random(SEED).sample(range(shards.num_samples), NUM_JUMPS)  # noqa: S311 (not a secret)
    start = time.perf_counter()
    for place in places:
        loader.load_state_dict(state | {"position": place})
        batches = iter(loader)
        (label,) = next(batches)[LABEL]
        if int(label) != place:
            raise ValueError(f"the sample at {place} has the label {label!r}")
    taken_s = time.perf_counter() - start
    dataset.close()
    return taken_s / NUM_JUMPS


def indexing(shards: Shards, num_shards: int) -> dict[str, float]:
    """Return the time to index many shards, relative to reading them."""
    with links(shards, num_shards) as many, nothing_remembered():
        read_raw(shards)  # into the page cache
        start = time.perf_counter()
        done = index_shards(list(map(str, many.paths)))
        index_s = time.perf_counter() - start
        if (done.num_written, done.num_samples) != (num_shards, many.num_samples):
            raise ValueError(f"{done} does not have {num_shards} new indexes with {many.num_samples:,} samples")
        start = time.perf_counter()
        read_raw(many)
        raw_s = time.perf_counter() - start
        loader, dataset = loader_of(many)
        num_samples, start = 0, time.perf_counter()
        for batch in loader:
            num_samples += len(batch[LABEL])
        read_s = time.perf_counter() - start
        dataset.close()
        if num_samples != many.num_samples:
            raise ValueError(f"the loader delivered {num_samples:,} of {many.num_samples:,} samples")
    return {"index_over_read": index_s / read_s, "index_over_raw": index_s / raw_s, "index_s": index_s}


@contextlib.contextmanager
def links(shards: Shards, num_shards: int) -> Iterator[Shards]:
    """Create links to shards, in turn, in a directory that has nothing else. Their checksum is not known."""
    with tempfile.TemporaryDirectory(dir=data_files.root(), prefix=".links-") as directory:
        paths = [Path(directory, f"shard-{number:06d}.tar") for number in range(num_shards)]
        for number, path in enumerate(paths):
            path.hardlink_to(shards.paths[number % len(shards.paths)])
        num_samples = shards.num_samples // len(shards.paths) * num_shards
        yield replace(shards, paths=tuple(paths), checksum=data_files.Checksum(num_samples))


def main() -> None:
    figures: dict[str, float] = {}
    resumes = [resuming_s(tars(size), **SHUFFLE) for size in SIZES]
    figures["resume_s"] = max(indexed for indexed, _ in resumes)
    figures["resume_without_index_s"] = max(walked for _, walked in resumes)
    figures["random_access_s"] = max(jumping_s(tars(size)) for size in SIZES)
    figures |= indexing(tars("100kb"), setting("SHARDS", 1_000, quick=32))
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
