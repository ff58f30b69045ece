"""Statistics are correct for every dtype, need little memory and can be stopped; their file is not trusted."""

from __future__ import annotations

import json
import logging
import math
import tracemalloc
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint import CheckpointManager, catalog
from strata.checkpoint.format import dtypes
from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.manifest import Manifest
from strata.checkpoint.load import statistics
from strata.checkpoint.load.statistics import Statistics, Tally, of_bytes
from strata.errors import CheckpointCorrupt, CheckpointInvalid, StorageUnavailable
from strata.storage import Watch
from strata.storage.memory import MemoryStore


def of_array(array: np.ndarray[Any, Any]) -> Statistics:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    found = of_bytes(data, dtypes.of_numpy(array.dtype, "x"))
    assert found is not None
    return found


def expected_of(array: np.ndarray[Any, Any]) -> Statistics:
    """Compute the statistics the slow and obvious way, in numbers of any size."""
    is_complex = array.dtype.kind == "c"
    numbers = [abs(complex(x)) if is_complex else x.item() for x in array.reshape(-1)]
    numbers = [x if isinstance(x, int) else float(x) for x in numbers]
    finite = [x for x in numbers if math.isfinite(x)]
    return Statistics(
        num_elements=array.size,
        min=min(finite, default=None),
        max=max(finite, default=None),
        mean=math.fsum(x / len(finite) for x in finite) if finite else None,
        norm=math.hypot(*finite),
        num_nan=sum(map(math.isnan, numbers)),
        num_inf=sum(map(math.isinf, numbers)),
    )


def assert_same(found: Statistics, expected: Statistics) -> None:
    for name in ("num_elements", "num_nan", "num_inf"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("min", "max"):  # exact, except for magnitudes, which take a square root
        one, other = getattr(found, name), getattr(expected, name)
        assert one == other or math.isclose(one, other, rel_tol=1e-15), name
    for name in ("mean", "norm"):
        one, other = getattr(found, name), getattr(expected, name)
        if other is None or not math.isfinite(other):
            assert one is None, name
        else:
            assert one is not None, name
            largest = max(abs(expected.min or 0), abs(expected.max or 0))
            assert math.isclose(one, other, rel_tol=1e-9, abs_tol=largest * 1e-12), name


ALL = [name for name in BY_NAME if name != "C32"]


@pytest.mark.parametrize("name", ALL)
@given(data=st.binary(max_size=256))
def test_any_bytes_of_any_type_have_the_statistics_of_their_numbers(name: str, data: bytes) -> None:
    dtype = BY_NAME[name]
    raw = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], np.uint8)
    if name == "BOOL":
        raw = raw & 1
    found = of_bytes(raw, dtype)
    assert found is not None
    array = raw.copy().view(dtypes.to_numpy(dtype))
    if array.dtype.name not in np.sctypeDict:  # a dtype of ml_dtypes
        with np.errstate(all="ignore"):
            array = array.astype(np.float64)
    expected = expected_of(array)

    assert_same(found, expected)


def test_half_precision_complex_numbers_count_by_magnitude() -> None:
    raw = np.array([3, 4, 0, 1, np.inf, 0, np.nan, 0], np.float16).view(np.uint8)
    found = of_bytes(raw, BY_NAME["C32"])

    assert found == Statistics(num_elements=4, min=1, max=5, mean=3, norm=math.sqrt(26), num_nan=1, num_inf=1)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.startswith("F8")])
def test_the_values_of_eight_bits_are_those_of_ml_dtypes(name: str) -> None:
    theirs = np.arange(256, dtype=np.uint8).view(dtypes.to_numpy(BY_NAME[name])).astype(np.float64)

    np.testing.assert_array_equal(np.array(statistics._values(name)), theirs)


@pytest.mark.parametrize("size", [0, 1, statistics.PIECE_ELEMENTS, statistics.PIECE_ELEMENTS * 2 + 7])
@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint64, np.bool_, ml_dtypes.bfloat16, np.complex64])
def test_pieces_add_up(size: int, dtype: Any) -> None:
    generator = np.random.default_rng(size)
    array = (generator.standard_normal(size) * 100).astype(np.float32)
    array = np.abs(array).astype(dtype) if dtype is np.uint64 else array.astype(dtype)
    wide = array.astype(np.float32) if dtype is ml_dtypes.bfloat16 else array

    assert_same(of_array(array), expected_of(wide))


def test_elements_that_are_not_finite_are_counted_and_otherwise_ignored() -> None:
    array = np.zeros(200_000, np.float32)
    array[:4] = [np.nan, np.inf, -np.inf, 3.0]
    array[-1] = np.nan

    assert of_array(array) == Statistics(
        num_elements=200_000, min=0, max=3, mean=3 / 199_996, norm=3, num_nan=2, num_inf=2
    )
    assert of_array(np.full(3, np.nan)) == Statistics(
        num_elements=3, min=None, max=None, mean=None, norm=0, num_nan=3, num_inf=0
    )


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 1.7e308])
def test_the_largest_and_the_smallest_numbers_have_a_mean_and_a_norm(size: float) -> None:
    array = np.array([size, -size, size, size])
    found = of_array(array)

    assert (found.min, found.max) == (-size, size)
    assert found.mean == pytest.approx(size / 2, rel=1e-3)
    assert found.norm == (pytest.approx(2 * size, rel=1e-3) if size < 1e308 else None)


def test_the_mean_of_many_elements_is_exact() -> None:
    """In float32 the sum of this many elements would no longer grow."""
    some = np.full(1 << 22, 0.1, np.float32)
    tally = Tally(BY_NAME["F32"])
    for _ in range(64):
        tally.add(some.view(np.uint8))
    found = tally.result()

    assert found.num_elements == 1 << 28
    assert found.mean == pytest.approx(float(np.float32(0.1)), rel=1e-12)
    assert found.norm == pytest.approx(float(np.float32(0.1)) * 2**14, rel=1e-12)


def test_unaligned_bytes_are_read_correctly() -> None:
    array = np.arange(1_000, dtype=np.float64)
    memory = np.zeros(array.nbytes + 3, np.uint8)
    memory[3:] = array.view(np.uint8)

    assert of_bytes(memory[3:], BY_NAME["F64"]) == of_array(array)


def test_statistics_stop_between_two_pieces() -> None:
    array = np.zeros(statistics.PIECE_ELEMENTS * 10, np.float32).view(np.uint8)
    asked = iter([False, False, True])

    assert of_bytes(array, BY_NAME["F32"], stop=lambda: next(asked)) is None
    assert next(asked, "all was asked") == "all was asked"


@pytest.mark.parametrize("name", ["F32", "BF16", "F16", "C64", "U8", "I64"])
def test_statistics_need_little_memory(name: str) -> None:
    data = np.zeros(64 << 20, np.uint8)
    tracemalloc.start()
    try:
        of_bytes(data, BY_NAME[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 8 << 20


@given(st.lists(st.lists(st.floats(width=32), max_size=20), min_size=1, max_size=5))
def test_statistics_of_slices_merge_into_those_of_the_tensor(slices: list[list[float]]) -> None:
    arrays = [np.array(one, np.float32) for one in slices]

    assert_same(statistics.merged([of_array(one) for one in arrays]), expected_of(np.concatenate(arrays)))


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved() -> tuple[MemoryStore, Manifest]:
    store = MemoryStore("statistics")
    with CheckpointManager(store=store, statistics=False) as manager:
        manager.save({"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([7, 9])}, step=1).wait()
    return store, catalog.Catalog(store).find()


def test_statistics_survive_writing_and_reading(saved: tuple[MemoryStore, Manifest]) -> None:
    store, manifest = saved
    assert statistics.read(store, manifest) is None
    computed = statistics.compute(store, manifest, watch=Watch())
    statistics.write(store, manifest.id, computed)

    assert statistics.read(store, manifest) == computed
    assert computed["n"] == Statistics(num_elements=2, min=7, max=9, mean=8, norm=math.sqrt(130), num_nan=0, num_inf=0)
    with CheckpointManager(store=store) as manager:
        assert manager.verify().id == manifest.id, "no other part of the library reads them"


def good(manifest: Manifest) -> dict[str, Any]:
    entry = {"num_elements": 6, "min": 0.0, "max": 5.0, "mean": 2.5, "norm": 7.4, "num_nan": 0, "num_inf": 0}
    return {"strata_statistics": 1, "checkpoint": manifest.id, "tensors": {"w": entry}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strata_statistics": 2}, "format 2"),
        ({"checkpoint": "other"}, "belongs to checkpoint 'other'"),
        ({"tensors": {"nobody": {}}}, "missing required field"),
        ({"tensors": []}, "Expected `object`"),
        ({"w": {"num_elements": 7}}, "7 elements, expected 6"),
        ({"w": {"num_nan": -1}}, "-1 NaN"),
        ({"w": {"num_inf": 7}}, "7 infinite"),
        ({"w": {"min": None}}, "min=None"),
        ({"w": {"num_nan": 6}}, "0 finite elements"),
        ({"w": {"min": 9.0}}, "min=9.0 above max=5.0"),
        ({"w": {"mean": "many"}}, "Expected"),
    ],
)
def test_an_impossible_statistics_file_is_ignored_with_a_warning(
    saved: tuple[MemoryStore, Manifest], change: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, manifest = saved
    content = good(manifest)
    if "w" in change:
        content["tensors"]["w"] |= change["w"]
    else:
        content |= change
    store.put(f"{manifest.id}/statistics.json", json.dumps(content).encode())
    with caplog.at_level(logging.WARNING):
        assert statistics.read(store, manifest) is None

    assert message in caplog.text
    store.put(f"{manifest.id}/statistics.json", json.dumps(good(manifest)).encode())
    assert set(statistics.read(store, manifest) or ()) == {"w"}


@given(st.binary(max_size=200))
def test_any_bytes_as_a_statistics_file_are_ignored(data: bytes) -> None:
    manifest = msgspec.convert(
        {"id": "x", "step": 0, "epoch": 0, "type": "FULL", "created_at_s": 0, "num_ranks": 1, "chunk_bytes": 1}
        | {"files": [], "tensors": [], "structures": [], "structure_of_rank": [], "full_bytes": 0, "written_bytes": 0}
        | {"model_hash": ""},
        Manifest,
    )
    with pytest.raises(CheckpointInvalid):
        statistics.decode(data, manifest)


def test_a_file_that_is_too_large_is_neither_written_nor_read(
    saved: tuple[MemoryStore, Manifest], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, manifest = saved
    computed = statistics.compute(store, manifest, watch=Watch())
    monkeypatch.setattr(statistics, "MAX_BYTES", 20)
    with caplog.at_level(logging.WARNING):
        statistics.write(store, manifest.id, computed)
        assert statistics.read(store, manifest) is None
        store.put(f"{manifest.id}/statistics.json", b" " * 21)
        assert statistics.read(store, manifest) is None

    assert "gets no statistics" in caplog.text
    assert "ignoring the statistics" in caplog.text


def test_an_unavailable_store_is_not_mistaken_for_missing_statistics(
    saved: tuple[MemoryStore, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifest = saved

    def fail(key: str, *, max_bytes: int) -> bytes:
        raise StorageUnavailable("nobody answers")

    monkeypatch.setattr(store, "get", fail)
    with pytest.raises(StorageUnavailable):
        statistics.read(store, manifest)


def test_large_tensors_are_read_in_windows_and_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "WINDOW_BYTES", 32 << 20)
    store = MemoryStore("windows")
    large = np.random.default_rng(1).standard_normal(10 << 20).astype(np.float32)  # three chunks
    state = {"large": large, "a": np.arange(3), "empty": np.zeros((0, 4)), "b": np.array(5.0)}
    with CheckpointManager(store=store) as manager:
        manager.save(state, step=1).wait()
    manifest = catalog.Catalog(store).find()
    moved: list[int] = []
    found = statistics.compute(store, manifest, watch=Watch(moved.append))

    assert list(found) == [tensor.name for tensor in manifest.tensors]
    assert found["large"] == of_array(large)
    assert (found["a"].max, found["b"].mean, found["empty"].min) == (2, 5.0, None)
    assert max(moved) <= (32 << 20) + 4_096
    assert sum(moved) >= large.nbytes
    (key,) = [listed.key for listed in store.walk() if listed.key.endswith(".safetensors")]
    data = bytearray(store.get(key, max_bytes=1 << 30))
    data[-1] ^= 1
    store.put_large(key, memoryview(data))
    with pytest.raises(CheckpointCorrupt):
        statistics.compute(store, manifest, watch=Watch())
