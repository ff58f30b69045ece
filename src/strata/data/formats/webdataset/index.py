"""The index of a shard: a file `SHARD.strata-index` beside it, with the outline that planning would otherwise walk for.

An index is a hint. It is used only if it has the size of the shard and the hashes of a few samples, and decoding checks
every header again, so a wrong index can cost an error but never a wrong row.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow.fs as pafs
import xxhash
import zstandard

from strata.data.formats.webdataset.headers import BLOCK_BYTES, SAMPLE_BYTES, TarDamage, walk
from strata.data.formats.webdataset.samples import MAX_EXTENSIONS, ShardOutline, parts
from strata.data.source.source import translate_errors
from strata.errors import DataFileMissing, StorageError

if TYPE_CHECKING:
    from strata.data.formats.webdataset.headers import ReadAt
    from strata.data.source.source import DataFile, Source

SUFFIX: Final = ".strata-index"
MAX_BYTES: Final = 256 << 20
"""Limit of an index, stored and unpacked."""
NUM_CHECKED: Final = 4
"""Samples whose headers are compared, the first and the last included."""
_MAGIC: Final = b"strata tar index 1\n"
_DIGEST_BYTES: Final = 16

log = logging.getLogger(__name__)


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_bytes: int
    """The size of the shard."""
    version: str
    extensions: tuple[str, ...]
    starts: bytes
    """The distances between samples, in blocks; the first is that from the beginning of the file."""
    presence: bytes
    hashes: bytes


def to_bytes(found: ShardOutline, num_bytes: int) -> bytes:
    blocks = np.diff(found.starts, prepend=0) // BLOCK_BYTES
    stored = _Stored(
        num_bytes=num_bytes,
        version=found.version,
        extensions=found.extensions,
        starts=blocks.astype("<i8").tobytes(),
        presence=found.presence.tobytes(),
        hashes=found.hashes.astype("<u4").tobytes(),
    )
    payload = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(stored))
    return b"".join([_MAGIC, xxhash.xxh3_128_digest(payload), payload])


def from_bytes(data: bytes) -> tuple[ShardOutline, int]:
    """Return the outline, and the size of the shard.

    Raises:
        ValueError: It is not an index of this version, or damaged.
    """
    payload = memoryview(data)[len(_MAGIC) + _DIGEST_BYTES :]
    if not data.startswith(_MAGIC):
        raise ValueError("it is not an index of this version of Strata")
    if xxhash.xxh3_128_digest(payload) != data[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES]:
        raise ValueError("its hash does not match")
    try:
        if not 0 <= zstandard.frame_content_size(payload) <= MAX_BYTES:
            raise ValueError("it is too large")
        stored = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(payload), type=_Stored)
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise ValueError(str(error)) from error
    blocks = np.frombuffer(stored.starts, "<i8").astype(np.int64)
    num_samples, width = len(blocks) - 1, -(-len(stored.extensions) // 8)
    limit = stored.num_bytes // BLOCK_BYTES
    is_possible = (
        num_samples >= 0
        and len(stored.extensions) <= MAX_EXTENSIONS
        and len(stored.presence) == num_samples * width
        and len(stored.hashes) == num_samples * 4
        and bool((blocks >= 0).all() and (blocks[1:] > 0).all() and (blocks <= limit).all())
        and int(blocks.sum()) <= limit
    )
    if not is_possible:
        raise ValueError("its numbers contradict each other")
    found = ShardOutline(
        np.cumsum(blocks) * BLOCK_BYTES,
        stored.extensions,
        np.frombuffer(stored.presence, np.uint8).reshape(num_samples, width),
        np.frombuffer(stored.hashes, "<u4").astype(np.uint32),
        stored.version,
    )
    return found, stored.num_bytes


def read(source: Source, file: DataFile, read_at: ReadAt) -> ShardOutline | None:
    """Return the outline of a shard from its index, or None if there is no index that can be trusted."""
    beside = index_file(file)
    try:
        info = source.info(beside.path, beside.name)
        if info.type != pafs.FileType.File or info.size is None:
            return None
        # A file above the limit is cut off, so its hash does not match.
        data = source.read(replace(beside, size_bytes=info.size), 0, min(info.size, MAX_BYTES)).to_pybytes()
        found, num_bytes = from_bytes(data)
        _check(found, num_bytes, file, read_at)
    except (DataFileMissing, StorageError) as error:
        log.debug("no index of %s: %s", file.name, error)
        return None
    except ValueError as error:  # TarDamage as well
        log.warning(
            "ignoring the index %s: %s; write it again with strata data index, or delete it", beside.name, error
        )
        return None
    return found


def write(source: Source, file: DataFile, found: ShardOutline) -> str:
    """Write the index beside the shard, and return its name.

    Raises:
        StorageError: It cannot be written.
    """
    beside = index_file(file)
    data = to_bytes(found, file.size_bytes)
    with translate_errors(beside.name):
        if isinstance(source.filesystem, pafs.LocalFileSystem):
            _replace(Path(beside.path), data)
        else:
            with source.filesystem.open_output_stream(beside.path) as opened:
                opened.write(data)
    return beside.name


def index_file(file: DataFile) -> DataFile:
    return replace(file, path=file.path + SUFFIX, name=file.name + SUFFIX)


def _check(found: ShardOutline, num_bytes: int, file: DataFile, read_at: ReadAt) -> None:
    """Compare the size and a few samples.

    Raises:
        ValueError: They differ from those of the shard.
    """
    if num_bytes != file.size_bytes:
        raise ValueError(f"the shard had {num_bytes:,} bytes, and has {file.size_bytes:,}")
    if not found.num_samples:
        return
    for number in np.unique(np.linspace(0, found.num_samples - 1, NUM_CHECKED).astype(np.int64)).tolist():
        first, last = int(found.starts[number]), int(found.starts[number + 1])
        try:
            _, _, _, member = next(parts(walk(read_at, first, last, has_marker=False)))
        except StopIteration:
            raise ValueError(f"there is no sample at byte {first:,}") from None
        except TarDamage as error:
            raise ValueError(f"there is no sample at {error}") from error
        head = member.header + read_at(member.offset, min(SAMPLE_BYTES, member.num_bytes))
        if member.start != first or xxhash.xxh32_intdigest(head) != int(found.hashes[number]):
            raise ValueError(f"the sample at byte {first:,} is another one; the shard was rewritten")


def _replace(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(data)
            os.fchmod(opened.fileno(), 0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
