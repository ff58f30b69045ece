"""Pack a directory of files into tar shards. `strata data pack` calls it.

The division into shards is decided before anything is written, from the names and sizes of the files, and headers hold
nothing else. The same directory therefore always gives the same bytes, and a pack that was stopped goes on: a journal
beside the shards, `_pack.jsonl`, lists those that are complete with their checksums.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec
import xxhash

from strata.config import parse_bytes
from strata.data.formats.webdataset import index
from strata.data.formats.webdataset.format import find_outline
from strata.data.formats.webdataset.headers import BLOCK_BYTES
from strata.data.formats.webdataset.samples import split_name
from strata.data.source.filesystem import open_source
from strata.data.source.source import DataFile
from strata.errors import DataFileChanged, DataFileInvalid, InvalidArgument, NoData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

JOURNAL: Final = "_pack.jsonl"
MAX_FILES: Final = 50_000_000
PIECE_BYTES: Final = 1 << 20
END_BYTES: Final = 2 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file to pack, and the name of its member."""

    name: str
    path: str
    num_bytes: int

    @property
    def header(self) -> bytes:
        """The header of the member: only its name and size, so that packing twice gives the same bytes."""
        info = tarfile.TarInfo(self.name)
        info.size, info.mode = self.num_bytes, 0o644
        return info.tobuf(tarfile.PAX_FORMAT)

    @property
    def stored_bytes(self) -> int:
        return len(self.header) + self.num_bytes + -self.num_bytes % BLOCK_BYTES


class PackedShard(msgspec.Struct, frozen=True, kw_only=True):
    """A complete shard, as the journal lists it."""

    name: str
    num_samples: int
    num_bytes: int
    xxh3_128: str


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the journal."""

    version: int
    plan: str
    """A hash of the names and sizes of all files, and of the division."""


def pack(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    max_bytes: int | str = "500MB",
    max_samples: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> list[PackedShard]:
    """Write `TARGET/shard-000000.tar`, … with an index each, and return the shards.

    Args:
        max_bytes: The size of a shard, which only a sample that is larger alone exceeds.
        max_samples: Samples of a shard.
        on_progress: Called with the shards done and their number.

    Raises:
        NoData: The directory has no files with an extension.
        InvalidArgument: An argument is wrong, or the target has the shards of other files.
        DataFileChanged: A file changed while it was read.
    """
    limit_bytes = parse_bytes(max_bytes, field="max_bytes")
    if max_samples is not None and max_samples < 1:
        raise InvalidArgument(f"max_samples={max_samples} must be 1 or more", field="max_samples")
    shards = divide(samples_of(Path(source)), max_bytes=limit_bytes, max_samples=max_samples)
    if not shards:
        raise NoData(f"{source} has no files with a key and an extension, such as 0001.jpg; check the path")
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    done = _resume(folder, _Header(version=1, plan=_hash(shards)))
    width = max(6, len(str(len(shards) - 1)))
    with (folder / JOURNAL).open("ab") as journal:
        for number, samples in enumerate(shards):
            name = f"shard-{number:0{width}}.tar"
            known = done.get(name)
            if known is None or not _has_size(folder / name, known.num_bytes):
                done[name] = _write_shard(folder / name, samples)
                journal.write(msgspec.json.encode(done[name]) + b"\n")
                journal.flush()
                os.fsync(journal.fileno())
            on_progress(number + 1, len(shards))
    return [done[f"shard-{number:0{width}}.tar"] for number in range(len(shards))]


def samples_of(folder: Path) -> list[list[PackedFile]]:
    """Return the files of each sample, sorted by key and extension. Hidden files are left out.

    Raises:
        DataFileInvalid: Two files are the same part of a sample.
        InvalidArgument: There are too many files.
    """
    found: dict[str, dict[str, PackedFile]] = {}
    for number, file in enumerate(_files(folder)):
        if number >= MAX_FILES:
            raise InvalidArgument(f"{folder} has more than {MAX_FILES:,} files; pack its parts", field="source")
        split = split_name(file.name)
        if split is None:
            continue
        key, extension = split
        others = found.setdefault(key, {})
        if extension in others:
            raise DataFileInvalid(
                f"{file.path} and {others[extension].path} are both the part {extension!r} of sample {key!r}; rename "
                "one of them",
                path=file.path,
            )
        others[extension] = file
    return [[parts[name] for name in sorted(parts)] for _, parts in sorted(found.items())]


def divide(
    samples: Sequence[list[PackedFile]], *, max_bytes: int, max_samples: int | None
) -> list[list[list[PackedFile]]]:
    """Return the samples of each shard."""
    shards: list[list[list[PackedFile]]] = []
    num_bytes = 0
    for sample in samples:
        size = sum(file.stored_bytes for file in sample)
        is_full = bool(shards) and (
            num_bytes + size + END_BYTES > max_bytes or (max_samples is not None and len(shards[-1]) >= max_samples)
        )
        if not shards or is_full:
            shards.append([])
            num_bytes = 0
        shards[-1].append(sample)
        num_bytes += size
    return shards


def _files(folder: Path) -> Iterator[PackedFile]:
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(directory, name)  # noqa: PTH118 - a Path object for each would double the time
            if not name.startswith(".") and os.path.isfile(path):  # noqa: PTH113
                yield PackedFile(os.path.relpath(path, folder), path, os.path.getsize(path))  # noqa: PTH202


def _hash(shards: Sequence[list[list[PackedFile]]]) -> str:
    digest = xxhash.xxh3_128()
    for shard in shards:
        for file in (file for sample in shard for file in sample):
            digest.update(msgspec.msgpack.encode((file.name, file.num_bytes)))
        digest.update(b"|")
    return digest.hexdigest()


def _resume(folder: Path, header: _Header) -> dict[str, PackedShard]:
    """Return the shards that an earlier call completed, or begin a journal.

    Raises:
        InvalidArgument: The directory has shards of other files.
    """
    path = folder / JOURNAL
    if not path.exists():
        if any(folder.glob("shard-*.tar")):
            raise InvalidArgument(
                f"{folder} has shards that were not packed here; choose an empty directory", field="target"
            )
        path.write_bytes(msgspec.json.encode(header) + b"\n")
        return {}
    first, *others = path.read_bytes().split(b"\n")
    if others and others[-1]:  # a process was killed while it wrote the last line
        os.truncate(path, path.stat().st_size - len(others.pop()))
    with contextlib.suppress(msgspec.DecodeError):
        if msgspec.json.decode(first, type=_Header) == header:
            return {shard.name: shard for line in others if line and (shard := _parse(line)) is not None}
    raise InvalidArgument(
        f"{folder} has shards of other files, or of another size; choose an empty directory", field="target"
    )


def _parse(line: bytes) -> PackedShard | None:
    """Return the shard of a line; None for a damaged one, whose shard is written again."""
    try:
        return msgspec.json.decode(line, type=PackedShard)
    except msgspec.DecodeError:
        return None


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _write_shard(path: Path, samples: Sequence[list[PackedFile]]) -> PackedShard:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
    digest = xxhash.xxh3_128()
    num_bytes = 0
    try:
        with os.fdopen(descriptor, "wb") as opened:
            for file in (file for sample in samples for file in sample):
                for piece in _pieces(file):
                    opened.write(piece)
                    digest.update(piece)
                    num_bytes += len(piece)
            opened.write(bytes(END_BYTES))
            digest.update(bytes(END_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
            os.fchmod(opened.fileno(), 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    num_bytes += END_BYTES
    status = path.stat()
    source, place = open_source(path)
    shard = DataFile(place, path.name, status.st_size, status.st_mtime_ns)
    index.write(source, shard, find_outline(source, shard, uses_index=False))
    return PackedShard(name=path.name, num_samples=len(samples), num_bytes=num_bytes, xxh3_128=digest.hexdigest())


def _pieces(file: PackedFile) -> Iterator[bytes]:
    yield file.header
    left = file.num_bytes
    with Path(file.path).open("rb") as opened:
        while left and (piece := _read(opened, left)):
            yield piece
            left -= len(piece)
        if left or opened.read(1):
            raise DataFileChanged(
                f"{file.path} changed while it was packed: it had {file.num_bytes:,} bytes; pack again once nothing "
                "writes to the directory",
                path=file.path,
            )
    yield bytes(-file.num_bytes % BLOCK_BYTES)


def _read(opened: BinaryIO, left: int) -> bytes:
    return opened.read(min(PIECE_BYTES, left))
