"""Patches, from their file onto the contents of a slice: a batch of units at a time, so that little memory is needed
however much has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strata.checkpoint.format import encoding
from strata.checkpoint.load import fetch
from strata.errors import CheckpointInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from strata.checkpoint.format.buffers import Bytes
    from strata.checkpoint.format.manifest import Manifest, Patch, Slice, TensorEntry
    from strata.checkpoint.load.fetch import Cache, Stored

    Indices = np.ndarray[Any, np.dtype[np.int64]]

BATCH_BYTES = 8 << 20


def stored(manifest: Manifest, tensor: TensorEntry, part: Slice) -> list[Stored]:
    """All that the patches of a slice consist of."""
    return [one for patch in part.patches for one in fetch.of_patch(manifest, tensor, patch)]


def apply(cache: Cache, manifest: Manifest, tensor: TensorEntry, part: Slice, target: Bytes, begin: int) -> None:
    """All patches of a slice, oldest first. `target` has its contents from byte `begin` on.

    Raises:
        CheckpointCorrupt: A hash does not match.
        CheckpointInvalid: Units that the slice does not have.
    """
    slice_bytes = fetch.of_slice(manifest, tensor, part).num_bytes
    end = begin + len(target)
    for patch in part.patches:
        unit = patch.unit_bytes
        data = fetch.Reader(cache, fetch.of_patch(manifest, tensor, patch)[1])
        for position, indices in batches(cache, manifest, tensor, patch, slice_bytes):
            if int(indices[0]) * unit >= end:
                break
            low, high = (int(i) for i in np.searchsorted(indices, [begin // unit, -(-end // unit)]))
            if low < high:
                first, last = (position + low) * unit, min((position + high) * unit, patch.num_bytes)
                new = data.read(first, last)
                xor = patch.encoding == encoding.XOR
                encoding.patch(target, begin, indices[low:high], new, unit_bytes=unit, xor=xor)


def batches(
    cache: Cache, manifest: Manifest, tensor: TensorEntry, patch: Patch, slice_bytes: int
) -> Iterator[tuple[int, Indices]]:
    """The numbers of the units, checked: how many came before, and the next ones."""
    stored_indices, _ = fetch.of_patch(manifest, tensor, patch)
    reader = fetch.Reader(cache, stored_indices)
    num_units = -(-slice_bytes // patch.unit_bytes)
    per_batch = max(BATCH_BYTES // max(patch.unit_bytes, patch.index_bytes), 1)
    before = -1
    for position in range(0, patch.num_units, per_batch):
        count = min(per_batch, patch.num_units - position)
        data = reader.read(position * patch.index_bytes, (position + count) * patch.index_bytes)
        indices = data.view(f"<u{patch.index_bytes}")
        problem = encoding.problem_of_indices(indices, before=before, num_units=num_units)
        before = int(indices[-1])
        if not problem and position + count == patch.num_units:
            problem = _problem_of_length(patch, before, slice_bytes)
        if problem:
            path = manifest.files[patch.file].path
            raise CheckpointInvalid(f"a patch of tensor {tensor.name!r} in {path} {problem}; save it anew")
        yield position, indices.astype(np.int64)


def _problem_of_length(patch: Patch, last: int, slice_bytes: int) -> str:
    """Only the slice's last unit may be shorter than the others."""
    expected = (patch.num_units - 1) * patch.unit_bytes + min(patch.unit_bytes, slice_bytes - last * patch.unit_bytes)
    if patch.num_bytes == expected:
        return ""
    return f"has {patch.num_bytes} bytes, but its units need {expected}"
