"""From a store back to tensors: every byte that is used has been compared with its hash.

Tensors that lie next to each other are read together, past the page cache, into memory of their own; hashing follows
the reading piece by piece. What comes back are views of that memory, so a load takes as much of it as the tensors have.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from strata.checkpoint import layout
from strata.checkpoint import manifest as m
from strata.checkpoint.dtypes import BY_NAME
from strata.checkpoint.layout import ALIGNMENT
from strata.checkpoint.staging import Bytes, aligned_memory
from strata.errors import CheckpointCorrupt, CheckpointInvalid, CheckpointMissing, ObjectMissing, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from strata.checkpoint.manifest import DataFile, Manifest, Slice, TensorEntry
    from strata.storage import Store, Watch

HASH_THREADS = 2
READ_BYTES = 64 << 20
"""Read at a time, before the next piece is begun and this one is hashed."""
_GAP_BYTES = 1 << 20
"""Tensors with less than this between them are read together."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours in one file that are read together."""

    file: int
    start: int
    end: int
    parts: tuple[tuple[TensorEntry, Slice], ...]


def read_tensors(
    store: Store, manifest: Manifest, names: Iterable[str], *, watch: Watch, verify: bool = True
) -> dict[str, Bytes]:
    """The bytes of each tensor, whole, in the order of its elements.

    Raises:
        CheckpointCorrupt: A hash does not match.
        CheckpointMissing: A file is not there.
        CheckpointInvalid: A file is shorter than it was.
    """
    entries = {tensor.name: tensor for tensor in manifest.tensors}
    wanted = [_entry(entries, name) for name in dict.fromkeys(names)]
    for number in sorted({part.file for tensor in wanted for part in tensor.slices}):
        _check_size(store, manifest, manifest.files[number])  # before memory is taken for what it claims to hold
    parts: dict[tuple[str, int], Bytes] = {}
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="strata-verify") as pool:
        for run in _runs(wanted):
            parts |= _read_run(store, manifest, run, pool, watch, verify=verify)
    return {tensor.name: _assembled(tensor, parts) for tensor in wanted}


def verify(store: Store, manifest: Manifest, *, watch: Watch) -> None:
    """Reads every byte that the checkpoint consists of, a window at a time.

    Raises:
        CheckpointInvalid: Something is not as it was written.
    """
    expected = m.model_hash(manifest.tensors)
    if manifest.model_hash != expected:
        raise CheckpointInvalid(f"checkpoint {manifest.id}: its model_hash is not that of its tensors, {expected}")
    for number, data_file in enumerate(manifest.files):
        _check_size(store, manifest, data_file)
        header = memoryview(aligned_memory(data_file.header_bytes))[: data_file.header_bytes]
        _fill(store, manifest, data_file, 0, header)
        _check("(the header)", data_file.path, header, 0, data_file.header_hash)
        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="strata-verify") as pool:
            for window in _windows(manifest, number):
                begin, end = window[0][1], max(chunk[2] for chunk in window)
                memory = memoryview(aligned_memory(end - begin))[: end - begin]
                watch.check()
                _fill(store, manifest, data_file, begin, memory)
                watch.advance(end - begin)
                checks = [
                    pool.submit(_check, name, data_file.path, memory[start - begin : stop - begin], start, expected)
                    for name, start, stop, expected in window
                ]
                for check in checks:
                    check.result()


def _windows(manifest: Manifest, file: int) -> Iterator[list[tuple[str, int, int, str]]]:
    """The chunks of a file in its order, as many together as are read at a time: (tensor, start, end, hash)."""
    found = sorted(
        (start, end, tensor.name, expected)
        for tensor in manifest.tensors
        for part in tensor.slices
        if part.file == file
        for (start, end), expected in zip(
            layout.chunks(part.offset, _num_bytes(tensor, part), manifest.chunk_bytes), part.hashes, strict=True
        )
    )
    window: list[tuple[str, int, int, str]] = []
    for start, end, name, expected in found:
        if window and end - window[0][1] > READ_BYTES:
            yield window
            window = []
        window.append((name, start, end, expected))
    if window:
        yield window


def _check_size(store: Store, manifest: Manifest, data_file: DataFile) -> None:
    try:
        size = store.size(key_of(manifest, data_file))
    except ObjectMissing:
        raise _missing(manifest, data_file) from None
    if size != data_file.size_bytes:
        raise CheckpointInvalid(
            f"{data_file.path} of checkpoint {manifest.id} has {size} bytes, expected {data_file.size_bytes}"
        )


def _missing(manifest: Manifest, data_file: DataFile) -> CheckpointMissing:
    return CheckpointMissing(f"checkpoint {manifest.id} has no file {data_file.path}; was it removed?")


def _entry(entries: dict[str, TensorEntry], name: str) -> TensorEntry:
    if name not in entries:
        raise CheckpointInvalid(f"the structure refers to tensor {name!r}, which the checkpoint does not have")
    return entries[name]


def _runs(tensors: Sequence[TensorEntry]) -> Iterator[_Run]:
    """In the order of the files."""
    parts = [(tensor, part) for tensor in tensors for part in tensor.slices if math.prod(part.shape)]
    parts.sort(key=lambda pair: (pair[1].file, pair[1].offset))
    run: list[tuple[TensorEntry, Slice]] = []
    end = 0
    for tensor, part in parts:
        if run and (part.file != run[0][1].file or part.offset - end > _GAP_BYTES):
            yield _Run(run[0][1].file, run[0][1].offset, end, tuple(run))
            run = []
        end = max(end, part.offset + _num_bytes(tensor, part)) if run else part.offset + _num_bytes(tensor, part)
        run.append((tensor, part))
    if run:
        yield _Run(run[0][1].file, run[0][1].offset, end, tuple(run))


def _num_bytes(tensor: TensorEntry, part: Slice) -> int:
    return math.prod(part.shape) * BY_NAME[tensor.dtype].itemsize


def _read_run(
    store: Store, manifest: Manifest, run: _Run, pool: ThreadPoolExecutor, watch: Watch, *, verify: bool
) -> dict[tuple[str, int], Bytes]:
    data_file = manifest.files[run.file]
    begin = run.start - run.start % ALIGNMENT  # what is aligned in the file is aligned in memory
    memory = memoryview(aligned_memory(run.end - begin))[: run.end - begin]
    pending = sorted(run.parts, key=lambda pair: pair[1].offset)
    checks: list[Future[None]] = []
    waiting = [
        (tensor, start, end, expected)
        for tensor, part in pending
        for (start, end), expected in zip(
            layout.chunks(part.offset, _num_bytes(tensor, part), manifest.chunk_bytes), part.hashes, strict=True
        )
    ]
    num_checked = 0
    for start in range(begin, run.end, READ_BYTES):
        watch.check()
        piece = memory[start - begin : min(start + READ_BYTES, run.end) - begin]
        _fill(store, manifest, data_file, start, piece)
        watch.advance(piece.nbytes)
        while verify and num_checked < len(waiting) and waiting[num_checked][2] <= start + piece.nbytes:
            tensor, first, last, expected = waiting[num_checked]
            args = (tensor.name, data_file.path, memory[first - begin : last - begin], first, expected)
            checks.append(pool.submit(_check, *args))
            num_checked += 1
    for check in checks:
        check.result()
    whole = np.frombuffer(memory, np.uint8)
    return {
        (tensor.name, part.offset): whole[part.offset - begin : part.offset - begin + _num_bytes(tensor, part)]
        for tensor, part in run.parts
    }


def _fill(store: Store, manifest: Manifest, data_file: DataFile, offset: int, out: memoryview) -> None:
    key = key_of(manifest, data_file)
    try:
        store.read_into(key, offset, out)
    except ObjectMissing:
        raise _missing(manifest, data_file) from None
    except StorageError:
        _check_size(store, manifest, data_file)  # too short is the checkpoint's fault, all else the store's
        raise


def key_of(manifest: Manifest, data_file: DataFile) -> str:
    """A path with a directory is of the base that an incremental checkpoint refers to."""
    return data_file.path if "/" in data_file.path else f"{manifest.id}/{data_file.path}"


def _check(name: str, file: str, data: memoryview, offset: int, expected: str) -> None:
    found = xxh3_128_hexdigest(data)
    if found != expected:
        raise CheckpointCorrupt(
            f"tensor {name!r} in {file}, bytes {offset} to {offset + data.nbytes}: the hash is {found}, "
            f"expected {expected}"
        )


def _assembled(tensor: TensorEntry, parts: dict[tuple[str, int], Bytes]) -> Bytes:
    """One slice is the tensor itself; several are put together."""
    dtype = BY_NAME[tensor.dtype]
    filled = [part for part in tensor.slices if math.prod(part.shape)]
    if not filled:
        return np.empty(0, np.uint8)
    if len(filled) == 1:
        return parts[tensor.name, filled[0].offset]
    # As records of the element's size, so that types unknown to numpy are put together, too.
    record = np.dtype((np.void, dtype.itemsize))
    whole: np.ndarray[Any, Any] = np.empty(tensor.shape, record)
    for part in filled:
        place = tuple(slice(start, start + size) for start, size in zip(part.start, part.shape, strict=True))
        whole[place] = parts[tensor.name, part.offset].view(record).reshape(part.shape)
    return whole.reshape(-1).view(np.uint8)
