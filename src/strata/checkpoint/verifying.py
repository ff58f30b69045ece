"""Whether a checkpoint is what was written: every byte of it is read, a few windows at a time.

Headers are read as well, although nobody needs them to load a checkpoint: they are what other programs believe, and
they tell when a file lies in another one's place.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from xxhash import xxh3_128_hexdigest

from strata.checkpoint import fetching, layout, patching
from strata.checkpoint import manifest as m
from strata.checkpoint.dtypes import BY_NAME
from strata.checkpoint.fetching import Cache, Source
from strata.errors import CheckpointCorrupt, CheckpointInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.checkpoint.fetching import Stored, Window
    from strata.checkpoint.layout import Place
    from strata.checkpoint.manifest import DataFile, Manifest, Patch, Slice, TensorEntry
    from strata.storage import Store, Watch

NUM_THREADS = 3
T = TypeVar("T")


def verify(store: Store, manifest: Manifest, *, watch: Watch) -> None:
    """Reads every byte that the checkpoint consists of, its bases' files included.

    Raises:
        CheckpointMissing: A file is not there.
        CheckpointCorrupt: A hash does not match.
        CheckpointInvalid: Something else is not as it was written.
    """
    expected = m.model_hash(manifest.tensors)
    if manifest.model_hash != expected:
        raise CheckpointInvalid(f"checkpoint {manifest.id}: its model_hash is not that of its tensors, {expected}")
    source = Source(store, manifest, watch)
    source.require(range(len(manifest.files)))
    for number, data_file in enumerate(manifest.files):
        places = _checked_header(source, manifest, number)
        if "/" not in data_file.path:
            _check_places(manifest, number, places)
    _check_chunks(source, manifest)


# -- contents ------------------------------------------------------------------------------------------------------


def _check_chunks(source: Source, manifest: Manifest) -> None:
    patches = [(tensor, part, patch) for tensor in manifest.tensors for part in tensor.slices for patch in part.patches]
    contents = [fetching.of_slice(manifest, tensor, part) for tensor in manifest.tensors for part in tensor.slices]
    contents += [fetching.of_patch(manifest, tensor, patch)[1] for tensor, _, patch in patches]
    found = fetching.windows((stored, number) for stored in contents for number in stored.chunks())
    _in_threads(lambda window: _check_window(source, window), list(found))
    indices = [fetching.of_patch(manifest, tensor, patch)[0] for tensor, _, patch in patches]
    cache = Cache(source, indices)
    _in_threads(lambda one: _check_indices(cache, manifest, *one), patches)


def _check_window(source: Source, window: Window) -> None:
    data = source.read(window.file, window.start, window.end)
    for stored, number in window.chunks:
        start, end = stored.in_file(number)
        source.decoded(stored, number, data[start - window.start : end - window.start])


def _check_indices(cache: Cache, manifest: Manifest, tensor: TensorEntry, part: Slice, patch: Patch) -> None:
    slice_bytes = fetching.of_slice(manifest, tensor, part).num_bytes
    for _ in patching.batches(cache, manifest, tensor, patch, slice_bytes):
        pass


def _in_threads(work: Callable[[T], None], items: Sequence[T]) -> None:
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="strata-verify")
    try:
        for done in [pool.submit(work, item) for item in items]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


# -- headers -------------------------------------------------------------------------------------------------------


def _checked_header(source: Source, manifest: Manifest, number: int) -> tuple[Place, ...]:
    data_file = manifest.files[number]
    header = bytes(source.read(number, 0, data_file.header_bytes))
    what = source.describe(data_file)
    found = xxh3_128_hexdigest(header)
    if found != data_file.header_hash:
        raise CheckpointCorrupt(
            f"{what} has a header whose hash is {found}, expected {data_file.header_hash}"
            + _other_owner(header, manifest, data_file)
        )
    metadata, places = layout.read_header(header, file=what, size_bytes=data_file.size_bytes)
    length = 8 + layout.header_length(header, file=what, size_bytes=data_file.size_bytes)
    if length != data_file.header_bytes:
        raise CheckpointInvalid(f"{what} has a header of {length} bytes, expected {data_file.header_bytes}")
    mismatch = _mismatch(metadata, manifest, data_file)
    if mismatch:
        raise CheckpointInvalid(f"{what} {mismatch}")
    return places


def _other_owner(header: bytes, manifest: Manifest, data_file: DataFile) -> str:
    """Whose file it is instead, if that can be told."""
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
        f"{expected[0]}; were files swapped? put each into its own directory, under its own name"
    )


def _check_places(manifest: Manifest, number: int, places: Sequence[Place]) -> None:
    """A slice that lies in its file as it is must be there under its name for other readers, too."""
    by_offset = {place.offset: place for place in places if place.num_bytes}
    for tensor in manifest.tensors:
        for part in tensor.slices:
            stored = fetching.of_slice(manifest, tensor, part)
            if part.file == number and stored.num_bytes and not part.encoding:
                _check_place(manifest, tensor, part, stored, by_offset.get(stored.offset))


def _check_place(manifest: Manifest, tensor: TensorEntry, part: Slice, stored: Stored, place: Place | None) -> None:
    dtype = BY_NAME[tensor.dtype]
    shape = dtype.shape_in_file(part.shape)
    path = manifest.files[part.file].path
    if place is None:
        raise CheckpointInvalid(
            f"{path}: the manifest has tensor {tensor.name!r} at byte {stored.offset}, its header has nothing there"
        )
    same = place.dtype.name == dtype.in_file and place.shape == shape and _is_akin(place.name, tensor.name)
    if not same:
        raise CheckpointInvalid(
            f"{path}: at byte {stored.offset} its header has tensor {place.name[:200]!r}, {place.dtype.name} "
            f"{place.shape}, but the manifest {tensor.name!r}, {dtype.in_file} {shape}; were files swapped?"
        )


def _is_akin(in_file: str, name: str) -> bool:
    """The same name, or one with something behind it: a rank's own tensor, or one of several slices in a file."""
    return in_file.startswith(name) or name.startswith(in_file)
