"""The consumer of samples, the same for every contender: it touches every payload and checks every label.

A batch is a mapping of columns: payloads and labels. Payloads are bytes or views of memory that the contender has read;
images are arrays. Labels are the numbers of the samples, as digits or as integers. Their sum, the sum of their squares
and the number of payload bytes must be exact at the end of a pass, and the last byte of every payload is read.

Peers load this file in their own environment, so it imports only other files that do not need Strata.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from strata.bench.tar_files import Shards

if __package__:
    from strata.bench import tar_files
    from strata.bench.contenders import data_consumer
else:  # in the peers' environment
    for folder in (Path(__file__).parent, Path(__file__).parents[1]):
        sys.path.append(str(folder))
    tar_files = importlib.import_module("tar_files")
    data_consumer = importlib.import_module("data_consumer")
    del sys.path[-2:]

NUM_WORKERS: int = data_consumer.NUM_WORKERS
REPETITIONS = 3
SIZES = {"10kb": 10_000, "100kb": 100_000}
"""Bytes of a sample, by the word for them in the names of figures."""
PEER_SHARDS = {"10kb": 4, "100kb": 16}
"""Shards that slow peers read: at least one for each of four workers, and far more batches than workers prefetch."""
MEGA = 10**6


def batch_size() -> int:
    found: int = data_consumer.setting("BATCH_SIZE", 128)
    return found


def tars(size: str, *, num_shards: int | None = None) -> Shards:
    """Return the shards with samples of a size of `SIZES`."""
    total = data_consumer.setting("MB", 512, quick=32) * MEGA
    found: Shards = tar_files.random_bytes(total, SIZES[size], num_shards=num_shards or tar_files.NUM_SHARDS)
    return found


def peer_tars(size: str) -> Shards:
    """Return the shards that slow peers read."""
    return tars(size, num_shards=PEER_SHARDS[size])


def images() -> Shards:
    found: Shards = tar_files.images(data_consumer.setting("IMAGES", 2_048, quick=256))
    return found


def text() -> Shards:
    found: Shards = tar_files.text(data_consumer.setting("MB", 512, quick=32) * MEGA)
    return found


class Consumer:
    """Consumes the batches of one pass."""

    def __init__(self, shards: Shards, *, is_decoded: bool = False) -> None:
        self._shards = shards
        self._is_decoded = is_decoded
        self._num_samples = 0
        self._num_bytes = 0
        self._label_sum = 0
        self._label_squares = 0

    def touch(self, batch: Mapping[str, Any]) -> int:
        """Touch a batch, and return its number of samples.

        Raises:
            ValueError: A training could not use the batch.
        """
        payloads, labels = batch[self._shards.part], batch[tar_files.LABEL]
        if len(payloads) != len(labels):
            raise ValueError(f"a batch has {len(payloads)} payloads and {len(labels)} labels")
        if self._is_decoded:
            for image in payloads:
                side = tar_files.IMAGE_PIXELS
                if sorted(image.shape) != [3, side, side]:
                    raise ValueError(f"an image has the shape {tuple(image.shape)}, not 3 × {side} × {side}")
                int(image[-1, -1, -1])
        else:
            self._num_bytes += sum(map(len, payloads))
            for payload in payloads:
                payload[-1]
        numbers = list(map(int, labels))
        self._label_sum += sum(numbers)
        self._label_squares += sum(number * number for number in numbers)
        self._num_samples += len(numbers)
        return len(numbers)

    def verify(self) -> None:
        """Check the sums of the pass.

        Raises:
            ValueError: Not every sample came exactly once, so the time is meaningless.
        """
        checksum = self._shards.checksum
        found = (self._num_samples, self._label_sum, self._label_squares % 2**64)
        sums = (checksum.num_rows, checksum.id_sum, checksum.id_squares)
        if found != sums:
            raise ValueError(
                f"samples, sum of labels and sum of squares are {found}, not {sums}: samples were lost or repeated"
            )
        if not self._is_decoded and self._num_bytes != self._shards.num_payload_bytes:
            raise ValueError(f"the payloads have {self._num_bytes:,} bytes, not {self._shards.num_payload_bytes:,}")


def pass_s(
    batches: Callable[[], Iterable[Mapping[str, Any]]],
    shards: Shards,
    *,
    is_decoded: bool = False,
    on_batch: Callable[[], object] | None = None,
) -> float:
    """Return the time of one pass, from the request of the first batch to the end; every sample is verified."""
    consumer = Consumer(shards, is_decoded=is_decoded)
    start = time.perf_counter()
    for batch in batches():
        consumer.touch(batch)
        if on_batch is not None:
            on_batch()
    taken_s = time.perf_counter() - start
    consumer.verify()
    return taken_s


def typical_pass_s(batches: Callable[[], Iterable[Mapping[str, Any]]], shards: Shards, **options: Any) -> float:
    """Return the time of the median pass after a warm-up pass."""
    return statistics.median([pass_s(batches, shards, **options) for _ in range(REPETITIONS + 1)][1:])


def mb_per_s(batches: Callable[[], Iterable[Mapping[str, Any]]], shards: Shards, **options: Any) -> float:
    """Return the throughput of the median pass, in payloads."""
    return shards.num_payload_bytes / MEGA / typical_pass_s(batches, shards, **options)


def images_per_s(batches: Callable[[], Iterable[Mapping[str, Any]]], shards: Shards) -> float:
    return shards.num_samples / typical_pass_s(batches, shards, is_decoded=True)


def samples_per_s_once(
    batches: Callable[[], Iterable[Mapping[str, Any]]], shards: Shards, *, is_decoded: bool = False
) -> float:
    """Return the samples per second of one pass, for contenders whose passes take long. It counts from the first batch,
    because the start of worker processes would not matter in a longer pass.
    """
    consumer = Consumer(shards, is_decoded=is_decoded)
    start = time.perf_counter()
    num_first, first_s = 0, start
    for batch in batches():
        num = consumer.touch(batch)
        if not num_first:
            num_first, first_s = num, time.perf_counter()
    end = time.perf_counter()
    consumer.verify()
    if num_first == shards.num_samples:  # there was only one batch
        return num_first / (end - start)
    return (shards.num_samples - num_first) / (end - first_s)


def mb_per_s_once(batches: Callable[[], Iterable[Mapping[str, Any]]], shards: Shards) -> float:
    return samples_per_s_once(batches, shards) * shards.num_payload_bytes / shards.num_samples / MEGA
