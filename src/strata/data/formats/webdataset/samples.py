"""Group the members of a tar into samples, and samples into row groups. Pure.

The key of a member is its path up to the first dot of the file name, and the extension is the rest in lower case, as in
the `webdataset` package: `a/0001.seg.png` is the part `seg.png` of the sample `a/0001`. Members without an extension,
and metadata (`__meta__.json`, `__meta__/…`), belong to no sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from strata.data.formats.base import Unit
from strata.data.formats.webdataset.headers import SAMPLE_BYTES, TarDamage, walk

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import numpy.typing as npt

    from strata.data.formats.webdataset.headers import Member, ReadAt

KEY: Final = "__key__"
MAX_EXTENSIONS: Final = 256
_META: Final = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True, slots=True, eq=False)
class ShardOutline:
    """Where the samples of a tar are, without their contents."""

    starts: npt.NDArray[np.int64]
    """The offset of each sample, followed by the end of the last one."""
    extensions: tuple[str, ...]
    """In the order of their first appearance."""
    presence: npt.NDArray[np.uint8]
    """Which parts each sample has: one row per sample, one bit per extension, packed."""
    hashes: npt.NDArray[np.uint32]
    """A hash of each sample's first header and the beginning of its first part."""
    version: str

    @property
    def num_samples(self) -> int:
        return len(self.starts) - 1

    def has(self, extension: str) -> npt.NDArray[np.bool_]:
        """Return which samples have this part."""
        if extension not in self.extensions:
            return np.zeros(self.num_samples, np.bool_)
        place = self.extensions.index(extension)
        return (self.presence[:, place // 8] >> (7 - place % 8) & 1).astype(np.bool_)

    def complete(self, required: Collection[str]) -> npt.NDArray[np.bool_]:
        """Return which samples have all of these parts."""
        kept = np.ones(self.num_samples, np.bool_)
        for extension in required:
            if extension != KEY:
                kept &= self.has(extension)
        return kept


def split_name(name: str) -> tuple[str, str] | None:
    """Return the key and the extension of a member, or None if it belongs to no sample."""
    key, dot, extension = name.partition(".")
    if "/" in extension:  # that was a dot in the name of a directory
        folder, slash, file = name.rpartition("/")
        begin, dot, extension = file.partition(".")
        key = folder + slash + begin
    if not dot or not key or key[-1] == "/" or (name[0] == "_" and _META.match(name)):
        return None
    return key, extension.lower()


def parts(members: Iterator[Member]) -> Iterator[tuple[bool, str, str, Member]]:
    """Yield for each part whether it begins a sample, its key, its extension and its member.

    Raises:
        TarDamage: A sample has two parts with the same extension.
    """
    current: str | None = None
    found: set[str] = set()
    for member in members:
        split = split_name(member.name)
        if split is None:
            continue
        key, extension = split
        is_first = key != current
        if is_first:
            current, found = key, set()
        if extension in found or extension == KEY:
            raise TarDamage(
                member.start, f"sample {key[:80]!r} has two parts {extension[:80]!r}; rename or remove one of them"
            )
        found.add(extension)
        yield is_first, key, extension, member


def outline(read_at: ReadAt, end: int) -> ShardOutline:
    """Walk a whole tar.

    Raises:
        TarDamage: See `walk` and `parts`.
    """
    digest = xxhash.xxh3_128()
    starts: list[int] = []
    hashes: list[int] = []
    places: dict[str, int] = {}
    present: list[int] = []
    last = 0
    for is_first, _, extension, member in parts(walk(read_at, 0, end, has_marker=True)):
        if is_first:
            starts.append(member.start)
            present.append(0)
        place = places.setdefault(extension, len(places))
        if place >= MAX_EXTENSIONS:
            raise TarDamage(
                member.start,
                f"there are more than {MAX_EXTENSIONS} extensions, the last is {extension[:80]!r}: an extension is all "
                "that follows the first dot of a file name; write keys without dots",
            )
        present[-1] |= 1 << place
        head = member.header + read_at(member.offset, min(SAMPLE_BYTES, member.num_bytes))
        if is_first:
            hashes.append(xxhash.xxh32_intdigest(head))
        digest.update(head)
        digest.update(member.name.encode())
        last = member.offset + member.num_bytes
    starts.append(-(-last // 512) * 512)
    return ShardOutline(
        np.array(starts, np.int64), tuple(places), _packed(present, len(places)), np.array(hashes, np.uint32),
        digest.hexdigest(),
    )  # fmt: skip


def cut(found: ShardOutline, unit_bytes: int, required: Collection[str] = ()) -> tuple[Unit, ...]:
    """Return the row groups: consecutive samples, each ended by the sample that brings it to `unit_bytes`.

    Samples that lack a required part are not rows; a row group without rows is left out.
    """
    rows = np.zeros(found.num_samples + 1, np.int64)
    np.cumsum(found.complete(required), out=rows[1:])
    units: list[Unit] = []
    first, place = 0, 0
    starts = found.starts
    while first < found.num_samples:
        last = min(int(np.searchsorted(starts, starts[first] + unit_bytes)), found.num_samples)
        last = max(last, first + 1)
        num_rows = int(rows[last] - rows[first])
        if num_rows:
            units.append(Unit(place, num_rows, int(rows[first]), int(starts[first]), int(starts[last] - starts[first])))
        first, place = last, place + 1
    return tuple(units)


def _packed(present: list[int], num_extensions: int) -> npt.NDArray[np.uint8]:
    width = -(-num_extensions // 8)
    bits = np.zeros((len(present), 8 * width), np.uint8)
    for place in range(num_extensions):
        bits[:, place] = [flags >> place & 1 for flags in present]
    return np.packbits(bits, axis=1) if width else np.zeros((len(present), 0), np.uint8)
