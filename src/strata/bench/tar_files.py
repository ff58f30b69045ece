"""The tar shards that `strata bench webdata` reads: generated once, the same on every machine, kept for the next run.

A sample has two parts: its payload, and a label, `cls`, which is the sample's number, so that every contender can prove
that it delivered each sample once. Payloads are random bytes, JPEGs, or lines of text in compressed shards.

Peers load this file in their own environment, so it does not import Strata.
"""

from __future__ import annotations

import importlib
import io
import itertools
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.bench.data_files import Checksum

if __package__:
    from strata.bench import data_files
else:  # in the peers' environment
    sys.path.append(str(Path(__file__).parent))
    data_files = importlib.import_module("data_files")
    sys.path.pop()

NUM_SHARDS = 16
LABEL = "cls"
BYTES, IMAGE, TEXT = "bin", "jpg", "txt"
NUM_PAYLOADS = 64
"""Different payloads of a dataset; samples repeat them."""
IMAGE_PIXELS = 256
IMAGE_CELLS = 32
"""Images are random at this size and enlarged, so that they compress like photographs."""
IMAGE_QUALITY = 85
WORD_BYTES = 6
NUM_WORDS = 4_096
TEXT_BYTES = 20_000
GZIP_LEVEL = 6


@dataclass(frozen=True, slots=True)
class Shards:
    """One dataset."""

    paths: tuple[Path, ...]
    part: str
    """The extension of the payloads."""
    num_payload_bytes: int
    checksum: Checksum
    """Of the labels."""

    @property
    def num_samples(self) -> int:
        return self.checksum.num_rows


def random_bytes(total_bytes: int, sample_bytes: int, *, num_shards: int = NUM_SHARDS) -> Shards:
    """Return the first `num_shards` of the shards with samples of this size; all of them have about `total_bytes`."""
    each = max(1, total_bytes // sample_bytes // NUM_SHARDS)
    rng = np.random.default_rng(data_files.SEED)
    payloads = _once(lambda: [rng.bytes(sample_bytes) for _ in range(NUM_PAYLOADS)])
    name = f"tar-{sample_bytes}-bytes-{each}-samples"
    return _shards(name, BYTES, each, payloads, lambda _: sample_bytes, num_shards)


def images(total: int) -> Shards:
    """Return shards of about `total` JPEGs."""
    each = max(1, total // NUM_SHARDS)
    payloads = _once(_jpegs)
    return _shards(f"tar-jpeg-{each}-samples", IMAGE, each, payloads, lambda number: len(payloads()[number]))


def text(total_bytes: int) -> Shards:
    """Return compressed shards with about this many bytes of text."""
    each = max(1, total_bytes // TEXT_BYTES // NUM_SHARDS)
    payloads = _once(_texts)
    return _shards(f"tar-text-{each}-samples", TEXT, each, payloads, lambda _: TEXT_BYTES, suffix=".tar.gz")


def _shards(
    name: str,
    part: str,
    each: int,
    payloads: Callable[[], list[bytes]],
    size_of: Callable[[int], int],
    num_shards: int = NUM_SHARDS,
    suffix: str = ".tar",
) -> Shards:
    def write(place: Path) -> None:
        for shard in range(NUM_SHARDS):
            write_shard(place / f"shard-{shard:06d}{suffix}", range(shard * each, (shard + 1) * each), part, payloads())

    directory = data_files.kept(name, write)
    num_samples = num_shards * each
    # Payloads repeat, so the sizes of one cycle are enough.
    sizes = [size_of(number) for number in range(min(num_samples, NUM_PAYLOADS))]
    return Shards(
        tuple(sorted(directory.glob(f"shard-*{suffix}"))[:num_shards]),
        part,
        sum(itertools.islice(itertools.cycle(sizes), num_samples)),
        data_files.checksum_of(range(num_samples)),
    )


def write_shard(path: Path, numbers: range, part: str, payloads: list[bytes]) -> None:
    """Write the samples with these numbers."""
    options: dict[str, Any] = {"compresslevel": GZIP_LEVEL} if path.suffix == ".gz" else {}
    mode: Any = "w:gz" if path.suffix == ".gz" else "w"
    with tarfile.open(path, mode, format=tarfile.USTAR_FORMAT, **options) as tar:
        for number in numbers:
            for extension, data in ((part, payloads[number % len(payloads)]), (LABEL, b"%d" % number)):
                info = tarfile.TarInfo(f"{number:09d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def _jpegs() -> list[bytes]:
    image = importlib.import_module("PIL.Image")
    rng = np.random.default_rng(data_files.SEED)
    found = []
    for _ in range(NUM_PAYLOADS):
        cells = rng.integers(0, 256, (IMAGE_CELLS, IMAGE_CELLS, 3), np.uint8)
        stream = io.BytesIO()
        picture = image.fromarray(cells).resize((IMAGE_PIXELS, IMAGE_PIXELS), image.Resampling.BICUBIC)
        picture.save(stream, "JPEG", quality=IMAGE_QUALITY)
        found.append(stream.getvalue())
    return found


def _texts() -> list[bytes]:
    rng = np.random.default_rng(data_files.SEED)
    letters = rng.integers(ord("a"), ord("z") + 1, (NUM_WORDS, WORD_BYTES), np.uint8)
    letters[:, -1] = ord(" ")
    words = TEXT_BYTES // WORD_BYTES + 1
    return [letters[rng.integers(0, NUM_WORDS, words)].tobytes()[:TEXT_BYTES] for _ in range(NUM_PAYLOADS)]


def _once(make: Callable[[], list[bytes]]) -> Callable[[], list[bytes]]:
    """Return a function that makes the payloads when they are first needed."""
    made: list[bytes] = []

    def get() -> list[bytes]:
        if not made:
            made.extend(make())
        return made

    return get
