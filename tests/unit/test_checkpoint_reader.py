"""Checkpoints in every form of the format are read bit by bit, and corrupt ones are rejected by name."""

from __future__ import annotations

import itertools
import json
import mmap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import zstandard
from checkpoint_files import BASE, HEADER_BYTES, ID, OLDER, HandMade
from hypothesis import given, settings
from xxhash import xxh3_128_hexdigest

from strata.checkpoint.format import buffers
from strata.checkpoint.format import manifest as m
from strata.checkpoint.format.shards import Box
from strata.checkpoint.load import fetch, integrity, reader
from strata.checkpoint.tools import diff, export
from strata.checkpoint.tools.diff import Side
from strata.errors import (
    CheckpointAborted,
    CheckpointCorrupt,
    CheckpointInvalid,
    CheckpointMissing,
    InvalidArgument,
    StorageError,
)
from strata.storage import Watch
from strata.storage.local import LocalStore
from strata.storage.memory import MemoryStore

ENCODINGS = st.sampled_from(["", "zstd"])


class CountingStore(MemoryStore):
    """Records which bytes were requested."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.reads.append((key, offset, out.nbytes))
        super().read_into(key, offset, out)


def load(store: Any, manifest: m.Manifest, name: str = "w") -> bytes:
    return reader.read_tensors(store, manifest, [name], watch=Watch())[name].tobytes()


def numbers(shape: tuple[int, ...], dtype: str = "<f4") -> np.ndarray[Any, Any]:
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


# -- patches and encodings -----------------------------------------------------------------------------------------


@st.composite
def patched(draw: st.DrawFn) -> tuple[MemoryStore, m.Manifest, bytes, int]:
    """Draw a base with patches in files of three checkpoints, the expected contents, and the size of an element."""
    store = MemoryStore()
    made = HandMade(store, chunk_bytes=draw(st.sampled_from([1, 7, 16, 64, 1 << 20])))
    files = [made.file(OLDER), made.file(BASE), made.file()]
    item = draw(st.sampled_from([1, 4, 8]))
    shape = draw(st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple))
    base = draw(st.binary(min_size=int(np.prod(shape)) * item, max_size=int(np.prod(shape)) * item))
    contents = bytearray(base)
    array = np.frombuffer(base, {1: "u1", 4: "<f4", 8: "<f8"}[item]).reshape(shape)
    kept = made.slice(files[0], "w", array, encoding=draw(ENCODINGS))
    patches = []
    for number in range(draw(st.integers(0, 4))):
        unit = draw(st.integers(1, len(contents) + 3))
        num_units = -(-len(contents) // unit)
        chosen = sorted(draw(st.sets(st.integers(0, num_units - 1), min_size=1)))
        data = draw(st.binary(min_size=len(chosen) * unit, max_size=len(chosen) * unit))
        patches.append(
            made.patch(
                files[min(number, 2)],
                f"w#{number}",
                contents,
                chosen,
                data,
                unit_bytes=unit,
                index_bytes=draw(st.sampled_from([4, 8])),
                encoding=draw(st.sampled_from(["", "zstd", "xor-zstd"])),
            )
        )
    made.tensor("w", {1: "U8", 4: "F32", 8: "F64"}[item], shape, msgspec.structs.replace(kept, patches=tuple(patches)))
    return store, made.finish(), bytes(contents), item


@settings(max_examples=100)
@given(patched(), st.data())
def test_a_base_with_any_patches_equals_numpy(
    made: tuple[MemoryStore, m.Manifest, bytes, int], data: st.DataObject
) -> None:
    store, manifest, expected, item = made

    assert load(store, manifest) == expected
    integrity.verify(store, manifest, watch=Watch())
    (tensor,) = manifest.tensors
    wanted = data.draw(rectangle_in(tensor.shape))
    found = reader.read_slices(store, manifest, {"w": wanted}, watch=Watch())["w"]
    whole = np.frombuffer(expected, f"V{item}").reshape(tensor.shape)
    assert found.tobytes() == whole[within(wanted)].tobytes()
    start = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(start, len(expected)))
    part = reader.read_contents(store, manifest, tensor, tensor.slices[0], start, end, watch=Watch())
    assert part.tobytes() == expected[start:end]


def rectangle_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    sides = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    return st.tuples(*sides).map(lambda ends: Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))


def within(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True))


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[MemoryStore, m.Manifest, np.ndarray[Any, Any], Box]:
    """Draw a tensor in slices over the files of several ranks, some encoded, some patched, and a wanted box."""
    store = MemoryStore()
    made = HandMade(store, chunk_bytes=draw(st.sampled_from([1, 6, 16, 40, 1 << 20])))
    files = [made.file(name=f"rank-{rank:05d}.safetensors", rank=rank) for rank in range(3)]
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    truth = numbers(shape, draw(st.sampled_from(["<u2", "<f4", "<i8"]))).copy()
    ends = [sorted(draw(st.sets(st.integers(0, size), max_size=3)) | {0, size}) for size in shape]
    slices = []
    for box in itertools.product(*(itertools.pairwise(sides) if len(sides) > 1 else [(0, 0)] for sides in ends)):
        place = tuple(slice(a, b) for a, b in box)
        part = np.ascontiguousarray(truth[place])
        file = draw(st.sampled_from(files))
        kept = made.slice(file, "w", part, start=[a for a, _ in box], encoding=draw(ENCODINGS))
        if part.nbytes and draw(st.booleans()):
            contents = bytearray(part.tobytes())
            unit = draw(st.integers(1, len(contents)))
            chosen = sorted(draw(st.sets(st.integers(0, -(-len(contents) // unit) - 1), min_size=1)))
            data = draw(st.binary(min_size=len(chosen) * unit, max_size=len(chosen) * unit))
            encoding = draw(st.sampled_from(["", "zstd", "xor-zstd"]))
            patch = made.patch(file, "w#p", contents, chosen, data, unit_bytes=unit, encoding=encoding)
            kept = msgspec.structs.replace(kept, patches=(patch,))
            truth[place] = np.frombuffer(bytes(contents), truth.dtype).reshape(part.shape)
        slices.append(kept)
    made.tensor("w", {"<u2": "U16", "<f4": "F32", "<i8": "I64"}[truth.dtype.str], shape, *slices)
    return store, made.finish(), truth, draw(rectangle_in(shape))


@settings(max_examples=100)
@given(cut_up())
def test_any_box_of_any_sharded_tensor_equals_numpys_slice(
    made: tuple[MemoryStore, m.Manifest, np.ndarray[Any, Any], Box],
) -> None:
    store, manifest, truth, wanted = made

    assert load(store, manifest) == truth.tobytes()
    found = reader.read_slices(store, manifest, {"w": wanted}, watch=Watch())["w"]
    assert found.tobytes() == truth[within(wanted)].tobytes()
    integrity.verify(store, manifest, watch=Watch())


def test_slices_larger_than_a_window_are_assembled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale limits down, so that small tensors take several runs, windows, batches and pieces."""
    monkeypatch.setattr(reader, "READ_BYTES", 1 << 12)
    monkeypatch.setattr(reader, "_STRIDED_BYTES", 1 << 12)
    monkeypatch.setattr(reader, "_HASH_BYTES", 1 << 11)
    monkeypatch.setattr(fetch, "WINDOW_BYTES", 1 << 11)
    monkeypatch.setattr("strata.checkpoint.load.fetch.BATCH_BYTES", 300)
    store = MemoryStore()
    made = HandMade(store, chunk_bytes=1_000)
    file = made.file()
    rng = np.random.default_rng(3)
    plain = rng.random((100, 50))
    contents = bytearray(plain.tobytes())
    rows = sorted(rng.choice(100, 37, replace=False).tolist())
    new = rng.bytes(37 * 400)
    whole = made.slice(file, "w", plain, encoding="zstd")
    patch = made.patch(file, "w#p", contents, rows, new, unit_bytes=400, encoding="xor-zstd")
    made.tensor("w", "F64", plain.shape, msgspec.structs.replace(whole, patches=(patch,)))
    for number in range(20):
        made.add(f"t{number}", np.full(700, number, np.uint8))
    manifest = made.finish()

    found = reader.read_tensors(store, manifest, [t.name for t in manifest.tensors], watch=Watch())
    columns = reader.read_slices(store, manifest, {"w": Box((3, 10), (90, 7))}, watch=Watch())["w"]

    truth = np.frombuffer(bytes(contents), "<f8").reshape(100, 50)
    assert found["w"].tobytes() == truth.tobytes()
    assert columns.tobytes() == truth[3:93, 10:17].tobytes()
    assert all(found[f"t{n}"].tobytes() == bytes([n]) * 700 for n in range(20))


# -- what is read --------------------------------------------------------------------------------------------------


def test_only_the_chunks_between_the_first_and_the_last_wanted_row_are_read() -> None:
    store = CountingStore()
    made = HandMade(store, chunk_bytes=4_000)
    made.file()
    made.add("w", numbers((1_000, 100)))  # ten rows to a chunk
    manifest = made.finish()

    found = reader.read_slices(store, manifest, {"w": Box((105, 0), (10, 100))}, watch=Watch())["w"]

    assert found.tobytes() == numbers((1_000, 100))[105:115].tobytes()
    assert [(offset - HEADER_BYTES, size) for _, offset, size in store.reads] == [(40_000, 8_000)]


def test_slices_outside_the_box_are_not_read_and_may_be_missing() -> None:
    store = CountingStore()
    made = HandMade(store, chunk_bytes=1 << 20)
    files = [made.file(name=f"rank-{rank:05d}.safetensors", rank=rank) for rank in range(4)]
    truth = numbers((8, 3))
    parts = [made.slice(file, "w", truth[2 * file : 2 * file + 2], start=(2 * file, 0)) for file in files]
    made.tensor("w", "F32", (8, 3), *parts)
    manifest = made.finish()
    store.delete([f"{ID}/rank-00000.safetensors"])

    found = reader.read_slices(store, manifest, {"w": Box((3, 0), (3, 3))}, watch=Watch())["w"]

    assert found.tobytes() == truth[3:6].tobytes()
    assert {key for key, _, _ in store.reads} == {f"{ID}/rank-00001.safetensors", f"{ID}/rank-00002.safetensors"}


def test_small_encoded_neighbours_are_read_with_one_request() -> None:
    store = CountingStore()
    made = HandMade(store)
    made.file()
    for number in range(50):
        made.add(f"t{number}", np.full(40, number, np.uint8), encoding="zstd")
    manifest = made.finish()

    found = reader.read_tensors(store, manifest, [f"t{n}" for n in range(50)], watch=Watch())

    assert all(found[f"t{n}"].tobytes() == bytes([n]) * 40 for n in range(50))
    assert len(store.reads) == 1


def test_a_small_box_does_not_keep_its_large_chunk_in_memory() -> None:
    store = MemoryStore()
    made = HandMade(store, chunk_bytes=1 << 20)
    made.file()
    made.add("w", numbers((1 << 20,), "|u1"))
    manifest = made.finish()

    piece = reader.read_slices(store, manifest, {"w": Box((5,), (10,))}, watch=Watch())["w"]

    assert memoryview(piece.base).nbytes == 10  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["plain", "encoded", "columns", "patched", "patched columns"])
def test_a_read_takes_the_memory_of_its_result_plus_a_constant(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale limits down: windows of 4 KiB for a tensor of a megabyte."""
    constants = {(fetch, "WINDOW_BYTES"): 1 << 12, (reader, "_STRIDED_BYTES"): 1 << 13}
    for (module, name), value in (constants | {(reader, "READ_BYTES"): 1 << 13}).items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("strata.checkpoint.load.fetch.BATCH_BYTES", 1 << 12)
    store = MemoryStore()
    made = HandMade(store, chunk_bytes=1 << 12)
    file = made.file()
    truth = np.random.default_rng(5).integers(0, 3, (1 << 10, 1 << 10), np.uint8)
    columns = [truth[:, at : at + 256] for at in range(0, 1 << 10, 256)] if "columns" in form else [truth]
    slices = []
    for number, part in enumerate(columns):
        kept = made.slice(file, "w", part, start=(0, 256 * number), encoding="zstd" * (form != "plain"))
        contents = bytearray(np.ascontiguousarray(part).tobytes())
        rows = list(range(0, 1 << 10, 3))
        patch = made.patch(file, "w#p", contents, rows, bytes(len(rows) * part.shape[1]), unit_bytes=part.shape[1])
        slices.append(msgspec.structs.replace(kept, patches=(patch,) if "patched" in form else ()))
    made.tensor("w", "U8", truth.shape, *slices)
    manifest = made.finish()
    taken = Taken()
    monkeypatch.setattr(fetch, "fresh_memory", taken.memory)
    monkeypatch.setattr(reader, "fresh_memory", taken.memory)

    found = reader.read_tensors(store, manifest, ["w"], watch=Watch())["w"]

    if "patched" in form:
        truth[::3] = 0
    assert found.tobytes() == truth.tobytes()
    assert taken.peak_bytes < (1 << 20) + 35 * (1 << 12)


class Taken:
    """Counts the memory that is in use."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # memory may be freed while some is taken
        self.num_bytes = self.peak_bytes = 0

    def memory(self, num_bytes: int) -> memoryview:
        array = np.empty(num_bytes, np.uint8)
        self.add(num_bytes)
        weakref.finalize(array, self.add, -num_bytes)
        return array.data

    def add(self, num_bytes: int) -> None:
        with self.lock:
            self.num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)


def test_a_box_outside_its_tensor_is_an_invalid_argument() -> None:
    store = MemoryStore()
    made = HandMade(store)
    made.file()
    made.add("w", numbers((4, 3)))
    manifest = made.finish()

    for box in (
        Box((3, 0), (2, 3)),
        Box((-1, 0), (1, 3)),
        Box((0,), (1,)),
        Box((0, 0), (1, -1)),
    ):
        with pytest.raises(InvalidArgument, match="is not within tensor"):
            reader.read_slices(store, manifest, {"w": box}, watch=Watch())


def test_a_cancelled_read_ends() -> None:
    store = MemoryStore()
    made = HandMade(store)
    made.file()
    made.add("w", numbers((4, 3)))
    made.add("z", numbers((4, 3)), encoding="zstd")
    manifest = made.finish()
    watch = Watch()
    watch.cancel()

    for name in ("w", "z"):
        with pytest.raises(CheckpointAborted):
            reader.read_tensors(store, manifest, [name], watch=watch)


def test_progress_counts_the_bytes_that_were_read() -> None:
    store = MemoryStore()
    made = HandMade(store)
    made.file()
    made.add("w", numbers((40, 3)))
    manifest = made.finish()
    seen: list[int] = []

    reader.read_tensors(store, manifest, ["w"], watch=Watch(seen.append))

    assert sum(seen) == 480


# -- what is refused -----------------------------------------------------------------------------------------------


class Patched:
    """A tensor of 100 bytes, a patch of its units 1, 4 and 12 (which is short), and a base to it."""

    def __init__(self, **patch: Any) -> None:
        self.store = MemoryStore()
        self.made = HandMade(self.store, chunk_bytes=32)
        base, own = self.made.file(BASE), self.made.file()
        self.contents = bytearray(range(100))
        kept = self.made.slice(base, "w", numbers((100,), "|u1"), encoding=patch.pop("base_encoding", ""))
        arguments = {"indices": [1, 4, 12], "data": b"x" * 20, "unit_bytes": 8, "encoding": ""} | patch
        self.patch = self.made.patch(own, "w#p", self.contents, **arguments)
        self.kept = kept

    def manifest(self, **changes: Any) -> m.Manifest:
        patch = msgspec.structs.replace(self.patch, **changes)
        self.made.tensors.clear()
        self.made.tensor("w", "U8", (100,), msgspec.structs.replace(self.kept, patches=(patch,)))
        return self.made.finish()

    def refuses(self, kind: type[Exception], message: str, manifest: m.Manifest) -> str:
        """Require that verifying and loading both raise; return the message of the load."""
        with pytest.raises(kind, match=message):
            integrity.verify(self.store, manifest, watch=Watch())
        with pytest.raises(kind, match=message) as caught:
            load(self.store, manifest)
        return str(caught.value)

    def renumber(self, indices: list[int]) -> dict[str, Any]:
        """Replace the three indices; return their correct hashes."""
        data = np.array(indices, "<u4").tobytes()
        at = self.patch.index_offset - HEADER_BYTES
        self.made.files[1].data[at : at + 12] = data
        return {"index_hashes": self.made.hashes(data)}


def test_the_hand_made_checkpoint_is_sound() -> None:
    sound = Patched()
    manifest = sound.manifest()

    integrity.verify(sound.store, manifest, watch=Watch())
    assert load(sound.store, manifest) == bytes(sound.contents)
    assert manifest.bases == (BASE,)


def test_indices_that_do_not_rise_are_rejected() -> None:
    bad = Patched()
    assert "'w'" in bad.refuses(CheckpointInvalid, "out of order", bad.manifest(**bad.renumber([1, 1, 12])))
    bad.refuses(CheckpointInvalid, "out of order", bad.manifest(**bad.renumber([4, 1, 12])))


def test_an_index_beyond_the_slice_is_rejected() -> None:
    bad = Patched()
    bad.refuses(CheckpointInvalid, "index 13, but the slice has only 13", bad.manifest(**bad.renumber([1, 4, 13])))
    bad.refuses(CheckpointInvalid, "4294967295", bad.manifest(**bad.renumber([1, 4, (1 << 32) - 1])))


def test_a_patch_with_the_wrong_size_is_rejected() -> None:
    bad = Patched()  # unit 11 is a whole one: four bytes are missing
    bad.refuses(CheckpointInvalid, "20 bytes, but its units need 24", bad.manifest(**bad.renumber([1, 4, 11])))


@pytest.mark.parametrize("encoding", ["", "zstd", "xor-zstd"])
def test_a_changed_byte_in_a_patchs_data_is_noticed(encoding: str) -> None:
    bad = Patched(encoding=encoding)
    manifest = bad.manifest()
    bad.made.damage(f"{ID}/rank-00000.safetensors", bad.patch.offset + 9, 0x3F)

    message = bad.refuses(CheckpointCorrupt, "a patch of tensor 'w' in rank-00000.safetensors, bytes", manifest)
    assert str(bad.patch.offset) in message


def test_a_changed_byte_in_a_patchs_indices_is_noticed() -> None:
    bad = Patched()
    manifest = bad.manifest()
    bad.made.damage(f"{ID}/rank-00000.safetensors", bad.patch.index_offset, 2)

    bad.refuses(CheckpointCorrupt, "the indices of a patch of tensor 'w'.*expected", manifest)


def test_a_corrupt_chunk_names_its_file_tensor_and_hashes_in_fields() -> None:
    bad = Patched()
    manifest = bad.manifest()
    bad.made.damage(f"{ID}/rank-00000.safetensors", bad.patch.offset + 9, 0x3F)

    with pytest.raises(CheckpointCorrupt) as caught:
        load(bad.store, manifest)
    error = caught.value
    assert (error.file, error.tensor) == ("rank-00000.safetensors", "w")
    assert error.expected in bad.patch.hashes
    assert error.found != error.expected
    assert f"the hash is {error.found}, expected {error.expected}" in str(error)


def test_a_changed_byte_in_the_base_is_noticed() -> None:
    bad = Patched()
    manifest = bad.manifest()
    bad.made.damage(f"{BASE}/rank-00000.safetensors", bad.kept.offset + 50)

    bad.refuses(CheckpointCorrupt, f"tensor 'w' in {BASE}/rank-00000.safetensors, bytes 8224 to 8256", manifest)


def test_a_deleted_base_is_named() -> None:
    bad = Patched()
    manifest = bad.manifest()
    bad.store.delete([f"{BASE}/rank-00000.safetensors"])

    message = bad.refuses(CheckpointMissing, f"base {BASE}, whose file rank-00000.safetensors does not exist", manifest)
    assert ID in message


def test_a_truncated_base_is_named_with_both_sizes() -> None:
    bad = Patched()
    manifest = bad.manifest()
    key = f"{BASE}/rank-00000.safetensors"
    bad.store.put(key, bad.store.get(key, max_bytes=1 << 20)[:-1])

    bad.refuses(CheckpointInvalid, f"of {BASE}.*has {HEADER_BYTES + 99} bytes, expected {HEADER_BYTES + 100}", manifest)


def encoded(frame: bytes, *, num_bytes: int = 64) -> tuple[MemoryStore, m.Manifest]:
    """Store one chunk of zeros with this frame."""
    store = MemoryStore()
    made = HandMade(store, chunk_bytes=num_bytes)
    file = made.file()
    offset = made.files[file].add("w", np.frombuffer(frame, np.uint8))
    hashes = (xxh3_128_hexdigest(bytes(num_bytes)),)
    kept = m.Slice(
        file=file, offset=offset, start=(0,), shape=(num_bytes,), hashes=hashes, encoding="zstd", frames=(len(frame),)
    )
    made.tensor("w", "U8", (num_bytes,), kept)
    return store, made.finish()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (zstandard.compress(bytes(63)), "has 63 bytes, expected 64"),
        (zstandard.compress(bytes(65)), "more than the expected 64 bytes"),
        (zstandard.compress(bytes(1 << 24)), "more than the expected 64 bytes"),
        (zstandard.compress(bytes(64)) + zstandard.compress(bytes(1)), "more than the expected 64 bytes"),
        (zstandard.compress(bytes(range(64)))[:-1], "has .* bytes, expected 64"),
        (zstandard.compress(b"\1" * 64), "the hash is"),
        (b"not a frame", "not a valid zstd frame"),
        (zstandard.compress(bytes(64))[:5], "has 0 bytes"),
        (b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip", "has 0 bytes"),
    ],
    ids=["short", "long", "bomb", "two", "truncated", "other", "noise", "header only", "skippable"],
)
def test_a_changed_frame_is_rejected(frame: bytes, message: str) -> None:
    store, manifest = encoded(frame)

    with pytest.raises(CheckpointCorrupt, match=f"tensor 'w' in rank-00000.safetensors.*{message}"):
        load(store, manifest)
    with pytest.raises(CheckpointCorrupt, match=message):
        integrity.verify(store, manifest, watch=Watch())


def test_a_decompression_bomb_gets_no_more_memory_than_its_chunk() -> None:
    out = memoryview(bytearray(64))
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))  # its size is only known after decompression

    assert len(bomb) < 1 << 16
    assert "more than the expected 64 bytes" in buffers.decompress(memoryview(bomb), out)


def test_a_frame_with_too_large_a_window_is_rejected() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = stream.compress(b"x" * 100) + stream.flush()

    assert "not a valid zstd frame" in buffers.decompress(memoryview(frame), memoryview(bytearray(100)))


@given(st.binary(max_size=200))
def test_any_bytes_as_a_frame_are_rejected_without_a_crash(frame: bytes) -> None:
    assert buffers.decompress(memoryview(frame), memoryview(bytearray(1_000))) != ""


def test_swapped_files_of_two_ranks_are_noticed() -> None:
    store = MemoryStore()
    made = HandMade(store)
    files = [made.file(name=f"rank-{rank:05d}.safetensors", rank=rank) for rank in range(2)]
    parts = [made.slice(file, "w", numbers((2, 3)), start=(2 * file, 0)) for file in files]
    made.tensor("w", "F32", (4, 3), *parts)
    manifest = made.finish()
    keys = [f"{ID}/rank-{rank:05d}.safetensors" for rank in range(2)]
    contents = [store.get(key, max_bytes=1 << 20) for key in keys]
    integrity.verify(store, manifest, watch=Watch())
    for key, data in zip(keys, reversed(contents), strict=True):
        store.put(key, data)

    with pytest.raises(CheckpointCorrupt, match=r"is the file of rank 1 .* expected that of rank 0 .*swapped"):
        integrity.verify(store, manifest, watch=Watch())


def test_the_file_of_another_checkpoint_is_noticed() -> None:
    store = MemoryStore()
    manifests = []
    for owner in (ID, OLDER):
        made = HandMade(store, owner=owner)
        made.file()
        made.add("w", numbers((2, 3)))
        manifests.append(made.finish())
    store.put(f"{ID}/rank-00000.safetensors", store.get(f"{OLDER}/rank-00000.safetensors", max_bytes=1 << 20))

    with pytest.raises(CheckpointCorrupt, match=f"of checkpoint '{OLDER}', expected that of rank 0 of {ID}"):
        integrity.verify(store, manifests[0], watch=Watch())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "I32", "shape": [2, 3], "data_offsets": [0, 24]}, "header has tensor 'w', I32"),
        ({"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}, r"\(3, 2\), but .* has 'w', F32 \(2, 3\)"),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 24]}, "needs 16"),
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}, "leaves a gap"),
    ],
)
def test_a_header_that_contradicts_the_manifest_is_rejected(entry: dict[str, Any], message: str) -> None:
    store = MemoryStore()
    made = HandMade(store)
    made.file()
    made.add("w", numbers((2, 3)))
    made.files[0].entries["w"] = entry

    with pytest.raises(CheckpointInvalid, match=message):
        integrity.verify(store, made.finish(), watch=Watch())


def test_a_header_with_another_tensor_name_is_rejected() -> None:
    store = MemoryStore()
    made = HandMade(store)
    made.file()
    made.add("w", numbers((2, 3)))
    made.files[0].entries["other"] = made.files[0].entries.pop("w")

    with pytest.raises(CheckpointInvalid, match=r"header has tensor 'other'.*manifest has 'w'"):
        integrity.verify(store, made.finish(), watch=Watch())


def test_a_failed_allocation_names_the_cure() -> None:
    """A petabyte of zeros is a few kilobytes of frames."""
    with pytest.raises(MemoryError, match="cannot allocate"):
        fetch.fresh_memory(1 << 55)


def warmed(step_s: float, *, num_steps: int) -> fetch.Warmer:
    """Return a warmer for which each step takes this long."""
    ticks = itertools.count()
    warmer = fetch.Warmer(lambda: next(ticks) // 2 * 1_000 + next(halves) * step_s)
    halves = itertools.cycle((0, 1))
    memory = fetch.fresh_memory(num_steps * (4 << 20) + 5)
    warmer.warm(memory)
    assert not any(memory[:: 1 << 16])
    return warmer


def test_huge_pages_are_abandoned_where_they_are_slower_than_small_ones() -> None:
    assert warmed(0.01, num_steps=6).gave_up
    assert not warmed(0.01, num_steps=2).gave_up
    assert not warmed(0.0004, num_steps=6).gave_up


# -- anything at all -----------------------------------------------------------------------------------------------


def sealed(body: Any) -> bytes:
    data = msgspec.json.encode(body)
    return b'{"strata_checkpoint":1,"hash":"%s","manifest":%s}' % (xxh3_128_hexdigest(data).encode(), data)


def fuzzed() -> tuple[MemoryStore, m.Manifest, HandMade]:
    """Return a checkpoint with one of everything."""
    one = Patched(encoding="xor-zstd", base_encoding="zstd")
    manifest = one.manifest()
    one.made.add("v", numbers((4, 3)), file=1)
    one.made.tensors.reverse()
    manifest = one.made.finish()
    integrity.verify(one.store, manifest, watch=Watch())
    return one.store, manifest, one.made


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in inner for place in places_in(item, (*path, key))]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.integers(-2, 200)
    | st.sampled_from([0, 1, 31, 32, 33, 100, 1 << 30, (1 << 63) - 1, 1 << 64, 10**400])
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["zstd", "xor-zstd", "U8", "F32", "C32", "../x", "f" * 32, "w", ID, BASE]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200)
@given(st.data())
def test_a_manifest_with_any_changed_value_is_read_or_rejected(data: st.DataObject) -> None:
    store, manifest, _ = fuzzed()
    body = json.loads(msgspec.json.encode(manifest))
    for _ in range(data.draw(st.integers(1, 3))):
        places = places_in(body)
        *path, last = places[data.draw(st.integers(0, len(places) - 1))]
        parent = body
        for key in path:
            parent = parent[key]
        match data.draw(st.sampled_from(["replace", "remove", "repeat"])):
            case "remove":
                del parent[last]
            case "repeat" if isinstance(parent, list):
                parent.append(parent[last])
            case _:
                parent[last] = data.draw(JSON)
    body["model_hash"] = model_hash_of(body)

    def use() -> None:
        found = m.decode(sealed(body), file="manifest.json")
        integrity.verify(store, found, watch=Watch())
        reader.read_tensors(store, found, [tensor.name for tensor in found.tensors], watch=Watch())
        assert found.id == body["id"]

    assert refusal_of(use) != ""


def refusal_of(use: Callable[[], None]) -> str:
    """Return the message of the rejection, by either allowed error, or "accepted"."""
    try:
        use()
    except (CheckpointInvalid, StorageError) as error:
        return str(error)
    return "accepted"


def model_hash_of(body: Any) -> Any:
    """Correct the hash, so that later checks are reached."""
    try:
        return m.model_hash(msgspec.convert(body["tensors"], tuple[m.TensorEntry, ...]))
    except (msgspec.ValidationError, KeyError, UnicodeEncodeError):
        return "0" * 32


@settings(max_examples=150)
@given(st.data())
def test_a_header_with_any_changed_value_is_read_or_rejected(data: st.DataObject) -> None:
    store, _, made = fuzzed()
    entries = json.loads(json.dumps(made.files[1].entries))
    places = places_in(entries)
    *path, last = places[data.draw(st.integers(0, len(places) - 1))]
    parent = entries
    for key in path:
        parent = parent[key]
    parent[last] = data.draw(JSON)
    made.files[1].entries = entries
    message = refusal_of(lambda: integrity.verify(store, made.finish(), watch=Watch()))
    assert message == "accepted" or "rank-00000.safetensors" in message


@settings(max_examples=100)
@given(st.data())
def test_a_header_of_any_bytes_is_rejected(data: st.DataObject) -> None:
    store, manifest, made = fuzzed()
    header = bytearray(made.files[1].header)
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, 700))] = data.draw(st.integers(0, 255))
    store.put(f"{ID}/rank-00000.safetensors", bytes(header) + bytes(made.files[1].data))
    own = msgspec.structs.replace(manifest.files[1], header_hash=xxh3_128_hexdigest(bytes(header)))
    forged = msgspec.structs.replace(manifest, files=(manifest.files[0], own))
    message = refusal_of(lambda: integrity.verify(store, forged, watch=Watch()))
    assert message == "accepted" or "rank-00000.safetensors" in message


# -- mapping -------------------------------------------------------------------------------------------------------


def mapped(tmp_path: Path) -> tuple[LocalStore, m.Manifest]:
    store = LocalStore(tmp_path)
    made = HandMade(store)
    base, own = made.file(BASE), made.file()
    made.add("plain", numbers((4, 3)), file=own)
    made.add("of the base", numbers((5,), "<i8"), file=base)
    made.add("encoded", numbers((4, 3)), file=own, encoding="zstd")
    halves = [made.slice(own, "sliced", numbers((2, 3)), start=(2 * i, 0)) for i in range(2)]
    made.tensor("sliced", "F32", (4, 3), *halves)
    contents = bytearray(numbers((4, 3)).tobytes())
    kept = made.slice(base, "patched", numbers((4, 3)))
    patch = made.patch(own, "patched#p", contents, [1], b"x" * 12, unit_bytes=12)
    made.tensor("patched", "F32", (4, 3), msgspec.structs.replace(kept, patches=(patch,)))
    made.tensor("empty", "F32", (0, 3), made.slice(own, "empty", numbers((0, 3))))
    return store, made.finish()


def test_unencoded_tensors_are_mapped_and_all_others_are_read(tmp_path: Path) -> None:
    store, manifest = mapped(tmp_path)
    names = [tensor.name for tensor in manifest.tensors]

    found = reader.map_tensors(store, manifest, names, watch=Watch())

    read = reader.read_tensors(store, manifest, names, watch=Watch())
    assert list(found) == names
    assert {name: data.tobytes() for name, data in found.items()} == {n: d.tobytes() for n, d in read.items()}
    assert {name for name, data in found.items() if is_mapped(data)} == {"plain", "of the base"}


def is_mapped(data: np.ndarray[Any, Any]) -> bool:
    base: Any = data
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap) if base is not None else False


def test_writing_to_a_mapped_tensor_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    store, manifest = mapped(tmp_path)
    tensor = reader.map_tensors(store, manifest, ["plain"], watch=Watch())["plain"]
    tensor[:] = 255

    assert tensor.tobytes() == b"\xff" * 48
    integrity.verify(store, manifest, watch=Watch())


def test_a_mapped_tensor_outlives_its_file(tmp_path: Path) -> None:
    store, manifest = mapped(tmp_path)
    tensor = reader.map_tensors(store, manifest, ["plain"], watch=Watch())["plain"]
    store.delete([f"{ID}/rank-00000.safetensors"])

    assert tensor.tobytes() == numbers((4, 3)).tobytes()


def test_a_file_with_the_wrong_size_or_header_is_not_mapped(tmp_path: Path) -> None:
    store, manifest = mapped(tmp_path)
    path = tmp_path / ID / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="the hash of the header is"):
        reader.map_tensors(store, manifest, ["plain"], watch=Watch())
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointInvalid, match="bytes, expected"):
        reader.map_tensors(store, manifest, ["plain"], watch=Watch())
    path.unlink()
    with pytest.raises(CheckpointMissing, match=r"file rank-00000.safetensors of .* does not exist"):
        reader.map_tensors(store, manifest, ["plain"], watch=Watch())


def test_tensors_of_other_stores_are_read_instead_of_mapped() -> None:
    store = MemoryStore()
    made = HandMade(store)
    made.file()
    made.add("w", numbers((4, 3)))
    manifest = made.finish()

    assert reader.map_tensors(store, manifest, ["w"], watch=Watch())["w"].tobytes() == numbers((4, 3)).tobytes()
    with pytest.raises(CheckpointInvalid, match="'other', which is not in the checkpoint"):
        reader.map_tensors(store, manifest, ["other"], watch=Watch())


# -- comparing and exporting ---------------------------------------------------------------------------------------


def two_states() -> tuple[MemoryStore, m.Manifest, m.Manifest, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A base in several chunks, and a checkpoint with two patched rows, a re-encoded and a re-cut tensor."""
    store = MemoryStore()
    before = numbers((60, 4))
    after = before.copy()
    after[7], after[50, 2] = 0.5, -1
    base = HandMade(store, owner=BASE)
    base.file()
    kept = base.add("w", before).slices[0]
    base.add("same", before)
    base.add("cut", before)
    old = base.finish()
    new = HandMade(store)
    theirs, own = new.file(BASE), new.file()
    new.files[theirs] = base.files[0]
    contents = bytearray(before.tobytes())
    data = after[7].tobytes() + after[50].tobytes()
    patch = new.patch(own, "w#p", contents, [7, 50], data, unit_bytes=16, encoding="xor-zstd")
    new.tensor("w", "F32", (60, 4), msgspec.structs.replace(kept, patches=(patch,)))
    new.add("same", before, file=own, encoding="zstd")
    columns = [new.slice(own, "cut", before[:, i : i + 2], start=(0, i)) for i in (0, 2)]
    new.tensor("cut", "F32", (60, 4), *columns)
    return store, old, new.finish(), before, after


def test_diff_finds_patched_rows_and_ignores_encodings_and_slices() -> None:
    store, old, new, before, after = two_states()

    found = diff.compare(old, new)
    by = diff.measure(Side(store, old), Side(store, new), found.changed)

    assert found.changed == ("w", "cut")
    assert (by["w"].num_different, by["w"].max_abs) == (5, float(np.abs(after - before).max()))
    assert by["cut"].num_different == 0
    assert diff.compare(new, new).changed == ()


def test_diff_reads_no_more_than_a_window_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "_WINDOW_BYTES", 128)
    store, old, new, before, after = two_states()

    by = diff.measure(Side(store, old), Side(store, new), ["w", "cut", "same"])

    assert [by[name].num_different for name in ("w", "cut", "same")] == [5, 0, 0]
    assert by["w"].max_abs == float(np.abs(after - before).max())


def test_export_writes_tensors_with_patches_encodings_and_slices(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    store, _, new, before, after = two_states()

    num = export.export(store, new, tmp_path / "out.safetensors")

    found = safetensors.load_file(tmp_path / "out.safetensors")
    assert num == 3
    assert np.array_equal(found["w"], after)
    assert np.array_equal(found["same"], before)
    assert np.array_equal(found["cut"], before)
