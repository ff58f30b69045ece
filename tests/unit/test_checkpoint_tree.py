"""State, taken apart and put together."""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given

from strata.checkpoint import dtypes, layout, tree
from strata.checkpoint.rebuilding import rebuild
from strata.checkpoint.staging import Staging
from strata.errors import CheckpointInvalid, InvalidArgument


def there_and_back(state: Any) -> Any:
    """Through the structure as JSON and the tensors as the bytes of a file."""
    flat = tree.flatten(state)
    plan = layout.plan(flat.leaves, {})
    staging = Staging()
    try:
        data = np.frombuffer(bytes(staging.fill(plan, flat.leaves)), np.uint8).copy()
    finally:
        staging.close()
    places = {place.name: place for place in plan.places}
    tensors = {name: data[place.offset : place.end] for name, place in places.items()}
    structure = json.loads(json.dumps(flat.structure))
    return rebuild(structure, [_Named(p.name, p.dtype.name, p.shape) for p in plan.places], tensors)


class _Named:
    def __init__(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape


def same(one: Any, other: Any) -> bool:
    """Equal in value, type and bits; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=40))
keys = st.one_of(st.text(max_size=8), st.integers(), st.tuples(st.integers(), st.text(max_size=3)))
arrays = st.tuples(
    st.sampled_from(["float32", "int64", "bool", "uint8", "complex64"]), st.lists(st.integers(0, 4), max_size=3)
).map(lambda pair: np.arange(math.prod(pair[1])).reshape(pair[1]).astype(pair[0]))
states = st.recursive(
    scalars | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(states)
def test_any_state_comes_back_as_it_was(state: Any) -> None:
    assert same(there_and_back(state), state)


def test_an_optimizers_state_comes_back_exactly() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = there_and_back(state)
    assert list(back["optimizer"]["state"]) == [0, 1]
    assert back["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert type(back["model"]) is OrderedDict
    for index, moments in state["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(back["optimizer"]["state"][index][name], tensor)
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(back["optimizer"])
    assert again.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [d for d in dtypes.DTYPES if d.torch], ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_every_type_of_tensor_comes_back_bit_for_bit(dtype: dtypes.DType, shape: tuple[int, ...]) -> None:
    raw = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8) % 2  # valid as bools, too
    tensor = (
        raw.view(dtypes.to_torch(dtype)).reshape(shape)
        if raw.numel()
        else torch.empty(shape, dtype=dtypes.to_torch(dtype))
    )
    back = there_and_back({"t": tensor})["t"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    if tensor.numel():
        assert back.reshape(-1).view(torch.uint8).tolist() == raw.tolist()


def test_tensors_that_do_not_lie_in_a_row_come_back() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    state = {"transposed": base.permute(2, 0, 1), "strided": base[:, ::2], "expanded": torch.ones(1).expand(5)}
    back = there_and_back(state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    big_endian = np.arange(5, dtype=">f4")
    assert there_and_back(big_endian).tolist() == [0, 1, 2, 3, 4]
    assert there_and_back(np.asfortranarray(np.arange(6).reshape(2, 3))).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert there_and_back(memoryview(b"abcdef")[::2]) == b"ace"


def test_conjugated_and_negated_views_are_stored_as_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(there_and_back(tensor.conj()), torch.tensor([1 - 2j, 3 + 4j]))


def test_numpy_types_that_numpy_itself_does_not_have_come_back() -> None:
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        array = np.arange(4).astype(getattr(ml_dtypes, name))
        assert same(there_and_back(array), array)


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    state = {"embedding": weight, "head": weight.detach(), "copy": weight.detach().clone()}
    assert [leaf.name for leaf in tree.flatten(state).leaves] == ["embedding", "copy"]
    back = there_and_back(state)
    back["embedding"][0, 0] = 7
    assert back["head"][0, 0] == 7
    assert back["copy"][0, 0] == 1
    array = np.ones(3)
    twice = there_and_back([array, array])
    assert twice[0] is twice[1]


def test_names_follow_the_path_and_never_clash() -> None:
    one, other, third = np.zeros(1), np.ones(1), np.ones(1)
    flat = tree.flatten({"a": {"b": one}, "a.b": other, "__metadata__": third})
    assert [leaf.name for leaf in flat.leaves] == ["a.b", "a.b#2", "__metadata__#2"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (Path("x"), "PosixPath"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (np.array(["a"]), "<U1"),
        (np.array([object()]), "object"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_and_place(value: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        tree.flatten({"part": [value]})
    assert "part.0" in str(caught.value)


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    with pytest.raises(InvalidArgument, match="part of itself"):
        tree.flatten(state)


@pytest.mark.parametrize(
    "node",
    [
        [],
        {},
        {"dict": 5},
        {"dict": [[1]]},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [[{"list": []}, 1]]},
        {"list": [], "dict": []},
        {"int": "x"},
        {"int": "9" * 10_000},
        {"float": []},
        {"complex": [1]},
        {"pickle": "cos\nsystem"},
        {"tensor": 5, "as": "torch"},
        {"tensor": "t", "as": "code"},
    ],
    ids=str,
)
def test_a_structure_that_flatten_does_not_make_is_refused(node: Any) -> None:
    with pytest.raises(CheckpointInvalid):
        tree.unflatten(node, lambda name, kind: name)


def test_a_structure_that_is_too_deep_is_refused() -> None:
    node: Any = 1
    for _ in range(500):
        node = {"list": [node]}
    with pytest.raises(CheckpointInvalid, match="deeper"):
        tree.unflatten(node, lambda name, kind: name)


def test_a_selection_keeps_the_shape_of_what_is_left() -> None:
    zero = np.zeros(1)
    flat = tree.flatten(
        {"model": {"w": zero, "b": np.ones(1)}, "optimizer": {"m": np.ones(2)}, "step": 3, "none": None}
    )
    chosen = tree.select(flat.structure, lambda name: name.endswith("w"))
    assert tree.unflatten(chosen, lambda name, kind: name) == {"model": {"w": "model.w"}, "step": 3, "none": None}
    assert tree.select(tree.flatten({"a": zero}).structure, lambda _: False) is None
