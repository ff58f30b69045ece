"""The byte layout of a data file, checked with the safetensors library."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given

from strata.checkpoint.format import dtypes, layout, tree
from strata.checkpoint.save.staging import PrivateMemory, Staging
from strata.errors import CheckpointInvalid


def file_of(state: Any) -> tuple[layout.Layout, bytes]:
    flat = tree.flatten(state)
    plan = layout.plan(flat.leaves, {"strata": "1"})
    memory = PrivateMemory()
    staging = Staging(memory)
    try:
        staging.fill(plan, flat.leaves)
        return plan, bytes(memory.view()[: plan.size_bytes])
    finally:
        staging.close()


def test_the_real_safetensors_library_opens_our_file(tmp_path: Path) -> None:
    state = {
        "f32": torch.randn(3, 5),
        "bf16": torch.randn(7).bfloat16(),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "i64": torch.arange(3),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "c64": torch.tensor([1 + 2j]),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(state)[1])
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(
            loaded[name].float() if name == "f8" else loaded[name], tensor.float() if name == "f8" else tensor
        )
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt", "strata": "1"}
        assert opened.get_slice("f32").get_shape() == [3, 5]


def test_complex_numbers_of_double_precision_are_stored_as_pairs(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of({"z": np.array([1 + 2j, 3 - 4j])})[1])
    assert safetensors.numpy.load_file(path)["z"].tolist() == [[1, 2], [3, -4]]


sizes = st.lists(st.tuples(st.sampled_from(dtypes.DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=8)


@given(sizes)
def test_data_begins_on_4_kib_and_every_tensor_on_its_own_elements(
    shapes: list[tuple[dtypes.DType, list[int]]],
) -> None:
    leaves = [
        tree.Leaf(f"t{i}", dtype, tuple(shape), "numpy", None, math.prod(shape) * dtype.itemsize)
        for i, (dtype, shape) in enumerate(shapes)
    ]
    plan = layout.plan(leaves, {})
    assert len(plan.header) % layout.ALIGNMENT == 0
    at = len(plan.header)
    for place in plan.places:
        assert place.offset == at
        assert place.offset % place.dtype.itemsize == 0
        at = place.end
    assert plan.size_bytes == at
    metadata, places = layout.read_header(plan.header, file="x", size_bytes=plan.size_bytes)
    assert metadata == {"format": "pt"}
    assert {(p.name, p.offset, p.num_bytes) for p in places} == {(p.name, p.offset, p.num_bytes) for p in plan.places}


def test_a_foreign_safetensors_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.uint8)}, path)
    data = path.read_bytes()
    _, places = layout.read_header(data, file="x", size_bytes=len(data))
    assert {place.name: place.shape for place in places} == {"a": (2, 3), "b": (3,)}


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 17))
def test_chunks_cover_a_tensor_without_gaps(offset: int, num_bytes: int, chunk_bytes: int) -> None:
    pieces = layout.chunks(offset, num_bytes, chunk_bytes)
    covered = [byte for start, end in pieces for byte in range(start, end)]
    assert covered == list(range(offset, offset + num_bytes))
    assert all(end - start == chunk_bytes for start, end in pieces[:-1])


def header(entries: dict[str, Any], *, data_bytes: int) -> tuple[bytes, int]:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + data_bytes


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entries", "data_bytes", "message"),
    [
        ({"a": F32, "b": F32}, 8, "overlaps"),
        ({"a": {**F32, "data_offsets": [4, 12]}}, 12, "gap"),
        ({"a": F32}, 9, "its header describes"),
        ({"a": F32}, 7, "its header describes"),
        ({"a": {**F32, "shape": [3]}}, 8, "needs 12"),
        ({"a": {**F32, "shape": [-2]}}, 8, "shape"),
        ({"a": {**F32, "shape": [1 << 62, 1 << 62]}}, 8, "needs"),
        ({"a": {**F32, "dtype": "F31"}}, 8, "'F31'"),
        ({"a": {**F32, "data_offsets": [8, 0]}}, 8, "needs 8"),
        ({"a": {**F32, "data_offsets": [-8, 0]}}, 8, "negative"),
        ({"a": {**F32, "shape": [1] * 257}}, 8, "has 257 dimensions, more than 256"),
        ({"a": {**F32, "shape": [1 << 62] * 256}}, 8, "has 8 bytes, but F32 .* needs"),
        ({"a": {**F32, "shape": [0, 10**4000]}}, 8, "impossibly large number"),
        ({"a": {**F32, "data_offsets": [0, 10**4000]}}, 8, "impossibly large number"),
        ({"a" * 10**6: {**F32, "shape": [3]}}, 8, "needs 12"),
        ({"a": {**F32, "dtype": "F" * 10**6}}, 8, "unknown dtype"),
        ({"a": 5}, 8, "header"),
        ({"__metadata__": {"x": 5}}, 0, "header"),
    ],
)
def test_an_impossible_header_is_rejected(entries: dict[str, Any], data_bytes: int, message: str) -> None:
    data, size_bytes = header(entries, data_bytes=data_bytes)
    with pytest.raises(CheckpointInvalid, match=message) as caught:
        layout.read_header(data, file="the file", size_bytes=size_bytes)
    assert "the file" in str(caught.value)
    assert len(str(caught.value)) < 10_000


def test_a_header_of_deep_or_duplicate_keys_is_rejected_in_linear_time() -> None:
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    wide = b'{"a":1,' + b",".join(b'"%d":1' % number for number in range(100_000)) + b',"99999":1}'

    with pytest.raises(CheckpointInvalid, match="the header is not a safetensors header"):
        layout.read_header(len(deep).to_bytes(8, "little") + deep, file="x", size_bytes=8 + len(deep))
    with pytest.raises(CheckpointInvalid, match=r"^x: an object has the key '99999' twice"):
        layout.check_duplicate_keys(wide, written=b"", file="x")


@given(st.binary(max_size=200), st.integers(0, 1 << 63))
def test_any_garbage_raises_checkpoint_invalid(data: bytes, length: int) -> None:
    for candidate in (data, length.to_bytes(8, "little") + data):
        with pytest.raises(CheckpointInvalid):
            layout.read_header(candidate, file="x", size_bytes=len(candidate))


@given(st.data())
def test_a_changed_header_byte_is_either_read_or_rejected(data: st.DataObject) -> None:
    plan, _ = file_of({"a": np.arange(4.0), "b": np.ones((2, 2), np.int8)})
    changed = bytearray(plan.header)
    changed[data.draw(st.integers(0, 150))] ^= data.draw(st.integers(1, 255))
    try:
        _, places = layout.read_header(bytes(changed), file="x", size_bytes=plan.size_bytes)
    except CheckpointInvalid:
        return
    assert sum(place.num_bytes for place in places) == plan.size_bytes - 8 - int.from_bytes(changed[:8], "little")
