"""Check that a checkpoint is what was written. Loading and verifying use the same functions, so they agree.

There are three checks:

- `check_manifest`: the hash of all contents, and the structures to rebuild. Reads nothing.
- `check_headers`: the headers of the files. Loading does not need them, but other programs trust them, and they reveal
  files that were swapped.
- The hash of every chunk, and the indices of every patch: see `fetch.Source` and `fetch.index_batches`.

`verify` applies them to the whole checkpoint, a load to what it reads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import layout, tree
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.load import fetch
from strata.checkpoint.load.fetch import Cache, Source
from strata.errors import CheckpointCorrupt, CheckpointInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from strata.checkpoint.format.layout import Place
    from strata.checkpoint.format.manifest import DataFile, Manifest, Patch, Slice, TensorEntry
    from strata.checkpoint.format.tree import Kind, Node
    from strata.checkpoint.load.fetch import Window
    from strata.storage import Store, Watch

VERIFY_THREADS = 3
HEADER_THREADS = 8
"""Headers read at a time: each is small, and may be remote."""

T = TypeVar("T")


def check_manifest_and_headers(source: Source, manifest: Manifest) -> None:
    """Check everything but the contents.

    Raises:
        CheckpointInvalid: See `check_manifest` and `check_headers`.
    """
    check_manifest(manifest, manifest.structures)
    check_headers(source, manifest, range(len(manifest.files)))


# -- the manifest --------------------------------------------------------------------------------------------------


def check_manifest(manifest: Manifest, structures: Iterable[Node]) -> None:
    """Check what `manifest.decode` does not: the hash of the contents and these structures.

    Raises:
        CheckpointInvalid: The hash does not match, or a structure cannot be rebuilt from the tensors.
    """
    expected = m.model_hash(manifest.tensors)
    if manifest.model_hash != expected:
        raise CheckpointInvalid(
            f"checkpoint {manifest.id}: its model_hash is {manifest.model_hash[:40]!r}, its tensors have {expected}"
        )
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    for structure in structures:
        tree.unflatten(structure, lambda name, kind: _check_leaf(entries, name, kind))


def _check_leaf(entries: Mapping[str, TensorEntry], name: str, kind: Kind) -> None:
    entry = entries.get(name)
    if entry is None:
        raise CheckpointInvalid(f"the structure refers to tensor {name[:200]!r}, which is not in the checkpoint")
    if kind in ("torch", "bytes"):
        return
    if not BY_NAME[entry.dtype].numpy:
        raise CheckpointInvalid(f"tensor {name[:200]!r} has the dtype {entry.dtype}, which {kind} does not have")
    if len(entry.shape) > m.MAX_DIMENSIONS:
        raise CheckpointInvalid(
            f"tensor {name[:200]!r} has {len(entry.shape)} dimensions, but {kind} supports at most {m.MAX_DIMENSIONS}"
        )


# -- headers -------------------------------------------------------------------------------------------------------


def check_headers(source: Source, manifest: Manifest, files: Iterable[int]) -> None:
    """Check the headers of these files.

    Raises:
        CheckpointMissing: A file does not exist.
        CheckpointCorrupt: The hash of a header does not match.
        CheckpointInvalid: A header contradicts the manifest.
    """
    numbers = sorted(set(files))
    source.require(numbers)
    if len(numbers) > 1:
        with ThreadPoolExecutor(min(HEADER_THREADS, len(numbers)), thread_name_prefix="strata-header") as pool:
            found = list(pool.map(lambda number: _checked_header(source, manifest, number), numbers))
    else:
        found = [_checked_header(source, manifest, number) for number in numbers]
    own = {
        number: {place.offset: place for place in places if place.num_bytes}
        for number, places in zip(numbers, found, strict=True)
        if "/" not in manifest.files[number].path
    }
    for tensor in manifest.tensors:
        for part in tensor.slices:
            if part.file in own and part.hashes and not part.encoding:  # a slice without a hash is empty
                _check_place(manifest, tensor, part, own[part.file].get(part.offset))


def _checked_header(source: Source, manifest: Manifest, number: int) -> tuple[Place, ...]:
    data_file = manifest.files[number]
    header = bytes(source.read(number, 0, data_file.header_bytes))
    what = source.describe(data_file)
    found = xxh3_128_hexdigest(header)
    if found != data_file.header_hash:
        raise CheckpointCorrupt(
            f"{what}: the hash of the header is {found}, expected {data_file.header_hash}"
            + _other_owner(header, manifest, data_file),
            file=data_file.path,
            expected=data_file.header_hash,
            found=found,
        )
    metadata, places = layout.read_header(header, file=what, size_bytes=data_file.size_bytes)
    length = 8 + layout.header_length(header, file=what, size_bytes=data_file.size_bytes)
    if length != data_file.header_bytes:
        raise CheckpointInvalid(f"{what}: the header has {length} bytes, expected {data_file.header_bytes}")
    mismatch = _mismatch(metadata, manifest, data_file)
    if mismatch:
        raise CheckpointInvalid(f"{what} {mismatch}")
    return places


def _other_owner(header: bytes, manifest: Manifest, data_file: DataFile) -> str:
    """Return which file this is instead, if its header names it."""
    try:
        metadata, _ = layout.read_header(header, file=data_file.path, size_bytes=data_file.size_bytes)
    except CheckpointInvalid:
        return ""
    mismatch = _mismatch(metadata, manifest, data_file)
    return f": it {mismatch}" if mismatch else ""


def _mismatch(metadata: dict[str, str], manifest: Manifest, data_file: DataFile) -> str:
    base, _, _ = data_file.path.rpartition("/")
    expected = (base or manifest.id, str(data_file.rank))
    found = (metadata.get("id", expected[0]), metadata.get("rank", expected[1]))
    if found == expected:
        return ""
    return (
        f"is the file of rank {found[1][:20]} of checkpoint {found[0][:200]!r}, expected that of rank {expected[1]} of "
        f"{expected[0]}; if files were swapped, put each back under its own name"
    )


def _check_place(manifest: Manifest, tensor: TensorEntry, part: Slice, place: Place | None) -> None:
    """Check that other safetensors readers find an unencoded slice under its name."""
    dtype = BY_NAME[tensor.dtype]
    shape = dtype.shape_in_file(part.shape)
    path = manifest.files[part.file].path
    if place is None:
        raise CheckpointInvalid(
            f"{path}: the manifest has tensor {tensor.name!r} at byte {part.offset}, the header has no tensor there"
        )
    same = place.dtype.name == dtype.in_file and place.shape == shape and _is_akin(place.name, tensor.name)
    if not same:
        raise CheckpointInvalid(
            f"{path}: at byte {part.offset} the header has tensor {place.name[:200]!r}, {place.dtype.name} "
            f"{place.shape}, but the manifest has {tensor.name!r}, {dtype.in_file} {shape}; check for swapped files"
        )


def _is_akin(in_file: str, name: str) -> bool:
    """Return whether the names match but for a suffix, as of a rank's own tensor or one of several slices."""
    return in_file.startswith(name) or name.startswith(in_file)


# -- every byte ----------------------------------------------------------------------------------------------------


def verify(store: Store, manifest: Manifest, *, watch: Watch) -> None:
    """Read and check every byte of a checkpoint, including the files of its bases.

    Raises:
        CheckpointMissing: A file does not exist.
        CheckpointCorrupt: A hash does not match.
        CheckpointInvalid: Something else is not as it was written.
    """
    source = Source(store, manifest, watch)
    check_manifest_and_headers(source, manifest)
    _check_chunks(source, manifest)


def _check_chunks(source: Source, manifest: Manifest) -> None:
    patches = [(tensor, part, patch) for tensor in manifest.tensors for part in tensor.slices for patch in part.patches]
    contents = [fetch.of_slice(manifest, tensor, part) for tensor in manifest.tensors for part in tensor.slices]
    contents += [fetch.of_patch(manifest, tensor, patch)[1] for tensor, _, patch in patches]
    found = fetch.windows((stored, number) for stored in contents for number in stored.chunks())
    _in_threads(lambda window: _check_window(source, window), list(found))
    indices = [fetch.of_patch(manifest, tensor, patch)[0] for tensor, _, patch in patches]
    cache = Cache(source, indices)
    _in_threads(lambda one: _check_indices(cache, manifest, *one), patches)


def _check_window(source: Source, window: Window) -> None:
    data = source.read(window.file, window.start, window.end)
    for stored, number in window.chunks:
        start, end = stored.in_file(number)
        source.decoded(stored, number, data[start - window.start : end - window.start])


def _check_indices(cache: Cache, manifest: Manifest, tensor: TensorEntry, part: Slice, patch: Patch) -> None:
    slice_bytes = fetch.of_slice(manifest, tensor, part).num_bytes
    for _ in fetch.index_batches(cache, manifest, tensor, patch, slice_bytes):
        pass


def _in_threads(work: Callable[[T], None], items: Sequence[T]) -> None:
    pool = ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="strata-verify")
    try:
        for done in [pool.submit(work, item) for item in items]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
