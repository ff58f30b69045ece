"""Whether a checkpoint is what was written: every byte of it is read, a few windows at a time.

What is right is decided in `integrity.py`, `fetch.py` and `patch.py`, as it is for whoever loads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from strata.checkpoint.load import fetch, integrity
from strata.checkpoint.load import patch as patching
from strata.checkpoint.load.fetch import Cache, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strata.checkpoint.format.manifest import Manifest, Patch, Slice, TensorEntry
    from strata.checkpoint.load.fetch import Window
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
    source = Source(store, manifest, watch)
    integrity.check(source, manifest)
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
    for _ in patching.batches(cache, manifest, tensor, patch, slice_bytes):
        pass


def _in_threads(work: Callable[[T], None], items: Sequence[T]) -> None:
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="strata-verify")
    try:
        for done in [pool.submit(work, item) for item in items]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
