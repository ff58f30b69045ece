"""Nested state is flattened and built again."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor, placement_types
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from strata.checkpoint.format import dtypes, layout, tree
from strata.checkpoint.format.buffers import Bytes, copy_strided, raw_bytes
from strata.checkpoint.format.shards import Shard, replicated_share
from strata.checkpoint.load.state import rebuild
from strata.errors import CheckpointInvalid, InvalidArgument


def there_and_back(state: Any) -> Any:
    """Convert a state to a JSON structure and file bytes, and back."""
    flat = tree.flatten(state)
    plan = layout.plan(flat.leaves, {})
    tensors = {leaf.name: stored(leaf) for leaf in flat.leaves}
    structure = json.loads(json.dumps(flat.structure))
    return rebuild(structure, [_Named(p.name, p.dtype.name, p.shape) for p in plan.places], tensors)


def stored(leaf: tree.Leaf) -> Bytes:
    """Return the bytes that a data file would hold."""
    out = np.empty(leaf.num_bytes, np.uint8)
    source = raw_bytes(leaf) if leaf.num_bytes else out
    if source is None:
        copy_strided(leaf, out)
    else:
        out[:] = source
    return out


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
def test_any_state_survives_flattening(state: Any) -> None:
    assert same(there_and_back(state), state)


def test_an_optimizer_state_survives_exactly() -> None:
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
def test_every_dtype_survives_bit_for_bit(dtype: dtypes.DType, shape: tuple[int, ...]) -> None:
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


def test_strided_tensors_survive() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    state = {"transposed": base.permute(2, 0, 1), "strided": base[:, ::2], "expanded": torch.ones(1).expand(5)}
    back = there_and_back(state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    big_endian = np.arange(5, dtype=">f4")
    assert there_and_back(big_endian).tolist() == [0, 1, 2, 3, 4]
    assert there_and_back(np.asfortranarray(np.arange(6).reshape(2, 3))).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert there_and_back(memoryview(b"abcdef")[::2]) == b"ace"


def test_conjugated_and_negated_views_are_stored_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(there_and_back(tensor.conj()), torch.tensor([1 - 2j, 3 + 4j]))


def test_dtypes_of_ml_dtypes_survive() -> None:
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
    ("value", "message"),
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
def test_a_value_that_cannot_be_stored_is_rejected_with_its_type_and_path(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        tree.flatten({"part": [value]})
    assert "part.0" in str(caught.value)


def test_a_state_that_contains_itself_is_rejected() -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    with pytest.raises(InvalidArgument, match="does not contain itself"):
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
def test_a_structure_that_flatten_does_not_return_is_rejected(node: Any) -> None:
    with pytest.raises(CheckpointInvalid):
        tree.unflatten(node, lambda name, kind: name)


def test_a_structure_that_is_too_deep_is_rejected() -> None:
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


def test_renaming_changes_some_names_and_shares_the_rest_of_the_structure() -> None:
    flat = tree.flatten({"a": [np.zeros(1), {"b": np.ones(1)}], "c": (np.ones(2), None), "d": {"e": 5}})
    changed = tree.renamed(flat.structure, {"a.1.b": "x", "nothing": "y"})
    assert tree.names_in(changed) == ["a.0", "x", "c.0"]
    assert changed["dict"][1][1] is flat.structure["dict"][1][1]
    assert tree.renamed(flat.structure, {"nothing": "y"}) is flat.structure
    assert tree.names_in(flat.structure) == ["a.0", "a.1.b", "c.0"]


# -- parts of larger tensors ---------------------------------------------------------------------------------------


def united(name: str, ranks: list[tree.Flat]) -> np.ndarray[Any, Any]:
    """Assemble a tensor from the leaves of several ranks; each element must come from exactly one."""
    leaves = [leaf for flat in ranks for leaf in flat.leaves if leaf.tensor == name]
    assert leaves
    assert leaves[0].global_shape is not None
    out = np.zeros(leaves[0].global_shape, np.float32)
    num_times = np.zeros(leaves[0].global_shape, int)
    for leaf in leaves:
        assert leaf.global_shape == out.shape
        assert leaf.start is not None
        region = tuple(slice(a, a + n) for a, n in zip(leaf.start, leaf.shape, strict=True))
        out[region] = stored(leaf).view(np.float32).reshape(leaf.shape)
        num_times[region] += 1
    assert (num_times == 1).all()
    return out


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_shard_is_a_leaf_with_its_start_and_a_whole_tensor_in_the_structure(kind: str) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    whole = torch.from_numpy(array) if kind == "torch" else array
    ranks = [
        tree.flatten({"emb": Shard(whole[2 * r : 2 * r + 2, :], shape=(4, 3), start=(2 * r, 0)), "step": 5})
        for r in range(2)
    ]
    assert [leaf.shape for leaf in ranks[1].leaves] == [(2, 3)]
    assert [(leaf.name, leaf.tensor, leaf.start) for leaf in ranks[1].leaves] == [("emb", "emb", (2, 0))]
    assert [flat.sharded for flat in ranks] == [("emb",), ("emb",)]
    assert ranks[0].structure == ranks[1].structure == tree.flatten({"emb": whole, "step": 5}).structure
    assert np.array_equal(united("emb", ranks), array)


def test_plain_tensors_have_no_start() -> None:
    flat = tree.flatten({"w": np.ones(2), "b": b"xy"})
    assert [(leaf.global_shape, leaf.start, leaf.tensor) for leaf in flat.leaves] == [
        (None, None, "w"),
        (None, None, "b"),
    ]
    assert flat.sharded == ()


def test_an_empty_shard_is_a_leaf_only_if_the_tensor_is_empty() -> None:
    none, empty = np.ones((0, 3), np.float32), np.ones((0, 2), np.float32)
    flat = tree.flatten({"w": Shard(none, shape=(4, 3), start=(4, 0)), "e": Shard(empty, shape=(0, 2), start=(0, 0))})
    assert [leaf.name for leaf in flat.leaves] == ["e"]
    assert tree.names_in(flat.structure) == ["w", "e"]


def test_tied_shards_are_stored_once_even_if_they_are_empty() -> None:
    for rows in (2, 0):
        local = torch.ones(rows, 3)
        tied = {
            "a": Shard(local, shape=(4, 3), start=(0, 0)),
            "b": Shard(local.detach(), shape=(4, 3), start=(0, 0)),
            "c": Shard(local.clone(), shape=(4, 3), start=(0, 0)),
        }
        assert tree.names_in(tree.flatten(tied).structure) == ["a", "c"]


@pytest.mark.parametrize(
    ("local", "shape", "start", "message"),
    [
        (np.ones(3), (4,), (2,), "does not fit"),
        (np.ones(3), (4, 1), (0, 0), "one number for each dimension"),
        (np.ones(3), (4,), (-1,), "negative"),
        (np.ones(3), (4,), (0.5,), "tuple of integers"),
        (np.ones(3), 4, (0,), "tuple of integers"),
        ([1, 2], (2,), (0,), "not a list"),
    ],
)
def test_a_shard_outside_its_tensor_is_rejected(local: Any, shape: Any, start: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Shard(local, shape=shape, start=start)


def test_an_invalid_local_value_of_a_shard_is_rejected_with_its_path() -> None:
    with pytest.raises(InvalidArgument, match=r"part\.0 is a Shard of a numpy\.float32"):
        tree.flatten({"part": [Shard(np.float32(1), shape=(), start=())]})
    with pytest.raises(InvalidArgument, match=r"part\.0 .*sparse"):
        tree.flatten({"part": [Shard(torch.eye(2).to_sparse(), shape=(2, 2), start=(0, 0))]})


# -- torch's DTensor -----------------------------------------------------------------------------------------------


def on_every_rank(mesh_shape: tuple[int, ...], make: Callable[[DeviceMesh], Any]) -> list[tree.Flat]:
    """Return what each rank of a mesh flattens, with torch's fake process group, which sends nothing."""
    flats = []
    for rank in range(math.prod(mesh_shape)):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
        try:
            flats.append(tree.flatten(make(init_device_mesh("cpu", mesh_shape))))
        finally:
            distributed.destroy_process_group()
            _clear_fast_path_sharding_prop_cache()  # it caches the mesh as this rank saw it
            _clear_python_sharding_prop_cache()
    return flats


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


split = placement_types.Shard
copied = placement_types.Replicate()
strided = placement_types._StridedShard


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape"),
    [
        ((4,), [split(0)], (8, 3)),
        ((4,), [split(1)], (3, 8)),
        ((4,), [split(0)], (5, 2)),  # the last of four ranks holds nothing
        ((4,), [split(0)], (2, 2)),
        ((4,), [copied], (3, 2)),
        ((2, 2), [split(0), split(1)], (4, 6)),
        ((2, 2), [split(0), split(0)], (8, 2)),
        ((2, 2), [split(0), split(0)], (5, 2)),
        ((2, 2), [copied, split(0)], (4, 2)),  # HSDP
        ((2, 2), [strided(0, split_factor=2), split(0)], (8, 2)),  # FSDP over tensor parallelism
        ((2, 2), [strided(0, split_factor=2), split(0)], (7, 2)),
        ((2, 2), [split(0), strided(0, split_factor=2)], (8, 2)),  # each rank has two pieces
        ((2, 3), [strided(0, split_factor=3), split(0)], (17, 2)),
        ((2, 2), [split(1), strided(0, split_factor=3)], (10, 3)),
        ((2, 2), [split(0), copied], ()),
        ((4,), [split(0)], (0, 3)),
    ],
    ids=str,
)
def test_the_parts_of_a_dtensor_cover_every_element_once(
    mesh_shape: tuple[int, ...], placements: list[Any], shape: tuple[int, ...]
) -> None:
    if not shape:
        placements = [copied] * len(mesh_shape)
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    ranks = on_every_rank(mesh_shape, lambda mesh: {"w": placed(tensor, mesh, placements)})
    assert all(flat.structure == {"dict": [["w", {"tensor": "w", "as": "torch"}]]} for flat in ranks)
    if math.prod(shape):
        assert np.array_equal(united("w", ranks), tensor.numpy())
    else:
        assert {leaf.global_shape for flat in ranks for leaf in flat.leaves} == {shape}


def test_the_start_of_a_part_is_the_one_that_torch_computes() -> None:
    tensor = torch.zeros(11, 6)

    def make(mesh: DeviceMesh) -> dict[str, Any]:
        part = placed(tensor, mesh, [split(0), split(1)])
        shape, start = compute_local_shape_and_global_offset(part.shape, mesh, part.placements)
        return {"w": part, "torch": [*shape, *start]}

    for flat in on_every_rank((3, 2), make):
        expected = tree.unflatten(flat.structure, lambda name, kind: name)["torch"]
        assert [[*leaf.shape, *(leaf.start or ())] for leaf in flat.leaves] == [expected]


def test_parts_with_gaps_have_unique_names() -> None:
    def make(mesh: DeviceMesh) -> dict[str, Any]:
        return {"w": placed(torch.zeros(8), mesh, [split(0), strided(0, split_factor=2)]), "w#1": np.zeros(1)}

    for flat in on_every_rank((2, 2), make):
        assert [(leaf.name, leaf.tensor) for leaf in flat.leaves] == [("w#0", "w"), ("w#2", "w"), ("w#1", "w#1")]


def test_tied_dtensors_have_one_name_on_all_ranks_even_where_they_are_empty() -> None:
    def make(mesh: DeviceMesh) -> dict[str, Any]:
        weight = placed(torch.ones(2, 3), mesh, [copied, split(0)])
        return {"embedding": weight, "head": weight.detach()}

    ranks = on_every_rank((2, 3), make)
    assert [len(flat.leaves) for flat in ranks] == [1, 1, 0, 0, 0, 0]
    assert all(tree.names_in(flat.structure) == ["embedding"] for flat in ranks)


def test_a_partial_dtensor_is_rejected_with_the_cure() -> None:
    def make(mesh: DeviceMesh) -> dict[str, Any]:
        return {"w": DTensor.from_local(torch.ones(2), mesh, [placement_types.Partial()])}

    with pytest.raises(InvalidArgument, match=r"w is a DTensor .* redistribute it"):
        on_every_rank((2,), make)


def test_a_local_tensor_that_contradicts_its_placements_is_rejected_with_the_cure() -> None:
    def make(mesh: DeviceMesh) -> dict[str, Any]:
        part = DTensor.from_local(torch.ones(3), mesh, [split(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
        return {"w": part}

    with pytest.raises(InvalidArgument, match=r"\(3,\), expected \(2,\); wrap"):
        on_every_rank((2,), make)


# -- replicated tensors --------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from(["model.", "rng."]), st.integers(0, 1_000)), max_size=30),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_replicated_tensors_are_written_once_in_about_equal_shares(
    tensors: list[tuple[str, int]], size: int, random: Any
) -> None:
    leaves = [
        tree.Leaf(f"{prefix}{i}", dtypes.BY_NAME["U8"], (num,), "bytes", None, num)
        for i, (prefix, num) in enumerate(tensors)
    ]
    part = tree.Leaf("model.part", dtypes.BY_NAME["U8"], (1,), "bytes", None, 1, (2,), (0,))
    shares = [
        replicated_share(random.sample([*leaves, part], len(leaves) + 1), ["model.*"], r, size) for r in range(size)
    ]
    own = {leaf.name for leaf in leaves if leaf.name.startswith("rng")} | {"model.part"}
    assert all(own <= share for share in shares)
    divided = [name for share in shares for name in sorted(share - own)]
    assert sorted(divided) == sorted(leaf.name for leaf in leaves if leaf.name.startswith("model"))
    sizes = {leaf.name: leaf.num_bytes for leaf in leaves}
    loads = [sum(sizes[name] for name in share - own) for share in shares]
    assert max(loads) - min(loads) <= max((sizes[name] for name in divided), default=0)


def test_a_single_pattern_may_be_a_string() -> None:
    leaves = tree.flatten({"model": np.ones(3), "x": np.ones(1)}).leaves
    assert [replicated_share(leaves, "model", rank, 2) for rank in range(2)] == [{"model", "x"}, {"x"}]


# -- JAX, in a process of its own: the number of devices is fixed when it is imported ------------------------------

JAX_CHILD = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from strata.checkpoint.format import tree
from strata.checkpoint.format.shards import Shard
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
whole = np.arange(24, dtype=np.float32).reshape(4, 6)
put = lambda *spec: jax.device_put(whole, NamedSharding(mesh, P(*spec)))
one = jax.device_put(whole, jax.devices()[1])
tied = put("x", "y")
state = {"grid": tied, "again": tied, "rows": put("x"), "copied": put(), "one": one,
         "both": put(("x", "y")), "part": Shard(one, shape=(8, 6), start=(4, 0))}
flat = tree.flatten(state)
found = {}
for leaf in flat.leaves:
    found.setdefault(leaf.tensor, []).append([leaf.name, leaf.start, leaf.global_shape, leaf.source.tolist()])
print(json.dumps({"leaves": found, "structure": flat.structure, "whole": whole.tolist(), "sharded": flat.sharded}))
try:
    tree.flatten({"w": Shard(put("x"), shape=(4, 6), start=(0, 0))})
except ValueError as error:
    print(json.dumps(str(error)))
"""


def test_a_jax_array_over_several_devices_is_one_tensor_of_several_parts() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", JAX_CHILD],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    described, refusal = map(json.loads, ended.stdout.splitlines())
    leaves, whole = described["leaves"], np.array(described["whole"])
    assert {name: [leaf[0] for leaf in found] for name, found in leaves.items()} == {
        "grid": ["grid#0", "grid#1", "grid#2", "grid#3"],
        "rows": ["rows#0", "rows#1"],
        "copied": ["copied"],
        "one": ["one"],
        "both": ["both#0", "both#1", "both#2", "both#3"],
        "part": ["part"],
    }
    assert described["sharded"] == ["grid", "rows", "both", "part"]
    assert tree.names_in(described["structure"]) == list(leaves)
    for name in ("grid", "rows", "both"):
        num_times = np.zeros_like(whole)
        for _, (y, x), shape, piece in leaves[name]:
            region = (slice(y, y + len(piece)), slice(x, x + len(piece[0])))
            assert (shape, piece) == ([4, 6], whole[region].tolist())
            num_times[region] += 1
        assert (num_times == 1).all()
    assert leaves["copied"] == [["copied", None, None, whole.tolist()]]
    assert leaves["part"] == [["part", [4, 0], [8, 6], whole.tolist()]]
    assert "w is a Shard of a" in refusal
