"""Tensors as views of their file, which the system reads when they are first touched.

The mapping is private: writing to a tensor copies the page that is written to, and the file stays as it is. Opening is
a matter of milliseconds however large the checkpoint is, and nothing is read twice; but **nothing is compared with its
hash** beyond the size of a file and its header. Whoever wants that, loads without mapping, or verifies
before. The file must stay while tensors are in use: deleting it is harmless (the mapping keeps it), but if it is cut
short in place the system ends the process (SIGBUS). Strata never changes a file.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from strata.checkpoint.load import integrity, reader
from strata.checkpoint.load.fetch import Source, key_of
from strata.errors import StorageError
from strata.storage.base import check_key
from strata.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import Manifest, TensorEntry
    from strata.storage import Store, Watch


def map_tensors(
    store: Store, manifest: Manifest, names: Iterable[str], *, watch: Watch, headers: Iterable[int] = ()
) -> dict[str, Bytes]:
    """As `reading.read_tensors`, mapped where that can be: in a directory, and where a tensor lies in its file whole,
    as it is. Everything else (object stores, slices, encodings, patches) is read and verified.

    Raises:
        CheckpointInvalid: A file is not there, has another size, or another header.
    """
    wanted = list(dict.fromkeys(names))
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    mappable = [entries[name] for name in wanted if name in entries and _can_be_mapped(store, entries[name])]
    source = Source(store, manifest, watch.unheard())
    files = {tensor.slices[0].file for tensor in mappable}
    integrity.check_headers(source, manifest, files)
    mapped = {number: _mapped(store, manifest, number) for number in files}
    found = {}
    for tensor in mappable:
        (part,) = tensor.slices
        found[tensor.name] = mapped[part.file][part.offset : part.offset + tensor.num_bytes]
    rest = [name for name in wanted if name not in found]
    found |= reader.read_tensors(store, manifest, rest, watch=watch, headers=set(headers) - files)
    return {name: found[name] for name in wanted}


def _can_be_mapped(store: Store, tensor: TensorEntry) -> bool:
    if not isinstance(store, LocalStore) or len(tensor.slices) != 1 or not tensor.num_bytes:
        return False
    (part,) = tensor.slices
    return not part.encoding and not part.patches


def _mapped(store: Store, manifest: Manifest, number: int) -> Bytes:
    assert isinstance(store, LocalStore)
    data_file = manifest.files[number]
    path = store.root / check_key(key_of(manifest, data_file))
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), data_file.size_bytes, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: it has become shorter since its size was looked at
        raise StorageError(f"{path} cannot be mapped: {error}; load it without mmap=True") from error
    return np.frombuffer(view, np.uint8)
