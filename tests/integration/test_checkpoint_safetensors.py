"""The real safetensors library opens our data files as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from strata.checkpoint import CheckpointManager
from strata.checkpoint.format.layout import ALIGNMENT

TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
NUMPY_DTYPES: list[Any] = [
    np.bool_,
    np.uint8,
    np.int8,
    np.uint16,
    np.int16,
    np.uint32,
    np.int32,
    np.uint64,
    np.int64,
    np.float16,
    np.float32,
    np.float64,
    np.complex64,
    ml_dtypes.bfloat16,
]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(str(tmp_path / "checkpoints")) as manager:
        yield manager


def the_file(manager: CheckpointManager, state: Any, **options: Any) -> Path:
    saved = manager.save(state, step=5, **options).wait()
    (path,) = Path(saved.path).glob("*.safetensors")
    return path


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_of_the_library_is_tested() -> None:
    assert set(safetensors.torch._TYPES.values()) <= set(TORCH_DTYPES)
    assert {np.dtype(dtype) for dtype in safetensors.numpy._TYPES.values()} <= set(map(np.dtype, NUMPY_DTYPES))


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_load_file_returns_torch_tensors_of_every_known_dtype(manager: CheckpointManager, dtype: torch.dtype) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype).reshape(4, 6)
    if dtype is torch.bool:
        tensor = torch.arange(24).reshape(4, 6) % 3 == 0
    state = {"whole": tensor, "turned": tensor.t(), "none": tensor[:0]}

    found = safetensors.torch.load_file(the_file(manager, state))

    assert set(found) == set(state)
    for name, expected in state.items():
        assert (found[name].dtype, found[name].shape) == (dtype, expected.shape)
        assert bits(found[name]) == bits(expected)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_load_file_returns_numpy_arrays_of_every_known_dtype(manager: CheckpointManager, dtype: Any) -> None:
    array = (np.arange(24) % 2).astype(dtype).reshape(4, 6)
    state = {"whole": array, "turned": array.T, "scalar": array[0, 1].reshape(())}

    found = safetensors.numpy.load_file(the_file(manager, state))

    assert set(found) == set(state)
    for name, expected in state.items():
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
        assert found[name].tobytes() == expected.tobytes()


@pytest.mark.parametrize(("dtype", "stored"), [(torch.complex128, torch.float64), (torch.complex32, torch.float16)])
def test_unsupported_complex_numbers_are_stored_as_their_parts(
    manager: CheckpointManager, dtype: torch.dtype, stored: torch.dtype
) -> None:
    value = torch.arange(12, dtype=stored).reshape(3, 2, 2)

    found = safetensors.torch.load_file(the_file(manager, {"z": torch.view_as_complex(value)}))["z"]

    assert found.dtype == stored
    assert torch.equal(found, value)
    assert manager.load()["z"].dtype == dtype


def test_safe_open_names_reads_and_slices_the_tensors(manager: CheckpointManager) -> None:
    weight = torch.arange(20.0).reshape(4, 5)
    path = the_file(manager, {"model": {"layers": [{"weight": weight}, {"weight": -weight}]}})

    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"model.layers.0.weight", "model.layers.1.weight"}
        assert torch.equal(file.get_tensor("model.layers.1.weight"), -weight)
        part = file.get_slice("model.layers.0.weight")
        assert (part.get_shape(), part.get_dtype()) == ([4, 5], "F32")
        assert torch.equal(part[1:3, ::2], weight[1:3, ::2])
    with safetensors.safe_open(path, framework="np") as file:
        assert np.array_equal(file.get_tensor("model.layers.0.weight"), weight.numpy())


def test_the_header_names_the_checkpoint_and_the_rank(manager: CheckpointManager) -> None:
    path = the_file(manager, {"w": torch.ones(3)}, metadata={"run": "a"})

    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata()

    assert (header["format"], header["strata"], header["id"], header["rank"]) == ("pt", "1", path.parent.name, "0")
    assert manager.get(step=5).metadata == {"run": "a"}


def test_tied_weights_are_stored_once_and_the_manager_ties_them_again(manager: CheckpointManager) -> None:
    embedding = torch.nn.Embedding(10, 4)
    head = torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})

    path = the_file(manager, model.state_dict())

    assert list(safetensors.torch.load_file(path)) == ["embedding.weight"]
    found = manager.load()
    assert found["head.weight"] is found["embedding.weight"]
    missing, unexpected = safetensors.torch.load_model(model, path)
    assert (missing, unexpected) == (set(), [])
    assert model["head"].weight is model["embedding"].weight


def test_a_model_is_loaded_from_our_file_by_the_library_itself(manager: CheckpointManager) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    path = the_file(manager, model.state_dict())
    fresh = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))

    safetensors.torch.load_model(fresh, path, strict=True)

    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in model.state_dict().items())


def test_data_begins_on_a_page_and_every_tensor_on_a_multiple_of_its_elements(manager: CheckpointManager) -> None:
    path = the_file(
        manager, {"b": torch.ones(3, dtype=torch.bool), "h": torch.ones(5).half(), "d": torch.ones(7).double()}
    )
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    assert (8 + length) % ALIGNMENT == 0
    sizes = {"b": 1, "h": 2, "d": 8}
    assert {name: header[name]["data_offsets"][0] % size for name, size in sizes.items()} == dict.fromkeys(sizes, 0)


def test_the_library_can_save_what_it_loaded(manager: CheckpointManager, tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(the_file(manager, {"a": torch.arange(6.0), "b": torch.ones(2).bfloat16()}))

    safetensors.torch.save_file(tensors, tmp_path / "again.safetensors")

    again = safetensors.torch.load_file(tmp_path / "again.safetensors")
    assert {name: bits(tensor) for name, tensor in again.items()} == {name: bits(t) for name, t in tensors.items()}
