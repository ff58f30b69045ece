"""JAX pytrees are restored with the structure, dtypes and shardings of a target."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from strata.checkpoint import CheckpointManager
from strata.checkpoint.adapters.pytrees import from_state, load_pytree, save_pytree, to_state
from strata.errors import InvalidArgument, NoCheckpoint


class AdamState(NamedTuple):
    """An optimizer state like optax's."""

    count: jax.Array
    mu: Any
    nu: Any


class EmptyState(NamedTuple):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    params: Any
    opt_state: Any
    step: int
    rng: jax.Array
    name: str = dataclasses.field(default="run", metadata={"static": True})


@jax.tree_util.register_pytree_with_keys_class
class Box:
    """A pytree node that names its children."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        return ((jax.tree_util.GetAttrKey("inside"), self.inside),), None

    @classmethod
    def tree_unflatten(cls, _aux: None, children: tuple[Any, ...]) -> Box:
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class Pair:
    """A pytree node that does not name its children."""

    def __init__(self, one: Any, two: Any) -> None:
        self.one, self.two = one, two

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.one, self.two), None

    @classmethod
    def tree_unflatten(cls, _aux: None, children: tuple[Any, Any]) -> Pair:
        return cls(*children)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(str(tmp_path / "checkpoints")) as manager:
        yield manager


def train_state(seed: int) -> TrainState:
    params = {
        "dense": {"kernel": jax.random.normal(jax.random.key(seed), (4, 3)), "bias": jnp.full(3, seed, jnp.bfloat16)},
        "layers": [jnp.arange(5) + seed, (jnp.float32(seed), None)],
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    adam = AdamState(jnp.int32(seed), zeros, jax.tree.map(lambda x: x + seed, zeros))
    return TrainState(params, (EmptyState(), adam), seed, jax.random.key(seed))


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        if isinstance(other, jax.Array | np.ndarray | np.generic):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
                one, other = jax.random.key_data(one), jax.random.key_data(other)
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        else:
            assert one == other


def in_child(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


# -- typical use ----------------------------------------------------------------------------------------------------


def test_a_train_state_comes_back_like_a_fresh_one(manager: CheckpointManager) -> None:
    save_pytree(manager, train_state(7), step=7, metadata={"run": "a"}).wait()

    found = load_pytree(manager, like=train_state(0))

    assert_same(found, train_state(7))
    assert isinstance(found.opt_state[1], AdamState)
    assert manager.get(step=7).metadata == {"run": "a"}


def test_names_are_key_paths_with_dots(manager: CheckpointManager) -> None:
    save_pytree(manager, train_state(1), step=1).wait()

    only = manager.load(only=["params.*", "opt_state.1.mu.dense.kernel", "rng.key_data"])

    assert only["params"]["layers"]["0"].tolist() == [1, 2, 3, 4, 5]
    assert set(only["opt_state"]["1"]["mu"]["dense"]) == {"kernel"}
    assert only["rng"]["prng_impl"] == "threefry2x32"


def test_a_step_or_an_id_names_the_checkpoint(manager: CheckpointManager) -> None:
    ids = [save_pytree(manager, {"w": jnp.float32(step)}, step=step).wait().id for step in (1, 2)]
    like = {"w": jnp.float32(0)}

    assert load_pytree(manager, like=like)["w"] == 2
    assert load_pytree(manager, like=like, step=1)["w"] == 1
    assert load_pytree(manager, like=like, id=ids[0])["w"] == 1
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 3"):
        load_pytree(manager, like=like, step=3)


def test_custom_nodes_come_back_whether_they_name_their_children_or_not(manager: CheckpointManager) -> None:
    tree = {"box": Box({"w": jnp.ones(2)}), "pair": Pair(jnp.zeros(1), [jnp.arange(3)])}
    save_pytree(manager, tree, step=0).wait()

    found = load_pytree(manager, like=jax.tree.map(jnp.zeros_like, tree))

    assert_same(found, tree)
    assert found["box"].inside["w"].tolist() == [1, 1]
    assert to_state(tree).keys() == {"box", "pair"}
    assert to_state(tree)["pair"].keys() == {"0", "1"}


def test_a_bare_array_and_an_empty_tree_are_pytrees_too(manager: CheckpointManager) -> None:
    save_pytree(manager, jnp.arange(3), step=1).wait()
    save_pytree(manager, {"a": None, "b": ()}, step=2).wait()

    assert load_pytree(manager, like=jnp.zeros(3, jnp.int32), step=1).tolist() == [0, 1, 2]
    assert load_pytree(manager, like={"a": None, "b": ()}, step=2) == {"a": None, "b": ()}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_implementation_continue_their_sequence(manager: CheckpointManager, impl: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    save_pytree(manager, {"keys": keys}, step=0).wait()

    found = load_pytree(manager, like={"keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype)})["keys"]

    assert jax.random.uniform(found[2], (3,)).tolist() == jax.random.uniform(keys[2], (3,)).tolist()


def test_numpy_leaves_and_plain_numbers_stay_what_they_are(manager: CheckpointManager) -> None:
    tree = {"a": np.arange(4, dtype=np.float64), "s": np.int16(-3), "lr": 0.1, "n": 1 << 60, "on": True, "c": 1 + 2j}
    save_pytree(manager, tree, step=0).wait()

    found = load_pytree(manager, like=jax.tree.map(lambda leaf: leaf * 0, tree))

    assert_same(found, tree)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"],
)
def test_every_dtype_comes_back_bit_for_bit(manager: CheckpointManager, dtype: str) -> None:
    tree = [jnp.arange(6).reshape(2, 3).astype(dtype), jnp.zeros((), dtype), jnp.zeros((0, 4), dtype)]
    save_pytree(manager, tree, step=0).wait()

    assert_same(load_pytree(manager, like=jax.eval_shape(lambda: tree)), tree)


# -- placement ------------------------------------------------------------------------------------------------------


def test_an_abstract_target_determines_the_placement_of_an_array(manager: CheckpointManager) -> None:
    save_pytree(manager, {"w": jnp.ones((2, 2)), "free": jnp.ones(2)}, step=0).wait()
    sharding = SingleDeviceSharding(jax.devices()[0])
    like = {
        "w": jax.ShapeDtypeStruct((2, 2), jnp.float32, sharding=sharding),
        "free": jax.ShapeDtypeStruct((2,), jnp.float32),
    }

    found = load_pytree(manager, like=like)

    assert found["w"].sharding == sharding
    assert found["w"].committed
    assert not found["free"].committed


SAVE_SHARDED = """
import sys
import numpy as np
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from strata.checkpoint import CheckpointManager
from strata.checkpoint.adapters.pytrees import load_pytree, save_pytree

assert len(jax.devices()) == 4
rows = NamedSharding(Mesh(jax.devices(), ("x",)), P("x"))
grid = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b")), P("a", "b"))
w = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
tree = {"w": jax.device_put(w, rows), "copied": jax.device_put(w, NamedSharding(rows.mesh, P()))}
with CheckpointManager(sys.argv[1]) as manager:
    save_pytree(manager, tree, step=0).wait()
    like = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=grid) for name in tree}
    found = load_pytree(manager, like=like)
    with jax.default_device(jax.devices()[2]):
        free = load_pytree(manager, like={name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in tree})
for name, array in found.items():
    assert free[name].devices() == {jax.devices()[2]}, name
    assert array.sharding == grid, name
    assert (array == w).all(), name
    assert {shard.data.shape for shard in array.addressable_shards} == {(4, 4)}, name
"""


def test_an_array_across_four_devices_comes_back_in_another_sharding(tmp_path: Path) -> None:
    ran = in_child(SAVE_SHARDED, str(tmp_path), XLA_FLAGS="--xla_force_host_platform_device_count=4")

    assert (ran.returncode, ran.stderr) == (0, "")
    with CheckpointManager(str(tmp_path)) as manager:
        manager.verify()
        found = load_pytree(manager, like={name: jnp.zeros((8, 8)) for name in ("w", "copied")})
    assert found["w"].tolist() == found["copied"].tolist() == np.arange(64).reshape(8, 8).tolist()


NO_TORCH = """
import sys
import jax, jax.numpy as jnp
from strata.checkpoint import CheckpointManager
from strata.checkpoint.adapters.pytrees import load_pytree, save_pytree

tree = {"w": jnp.ones(3), "key": jax.random.key(1)}
with CheckpointManager(sys.argv[1]) as manager:
    save_pytree(manager, tree, step=0).wait()
    assert load_pytree(manager, like=tree)["w"].tolist() == [1, 1, 1]
    manager.verify()
print("torch" in sys.modules)
"""


def test_jax_alone_does_not_import_torch(tmp_path: Path) -> None:
    ran = in_child(NO_TORCH, str(tmp_path))

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False\n", "")


def test_a_checkpoint_saved_from_jax_can_be_loaded_as_numpy(manager: CheckpointManager) -> None:
    save_pytree(manager, {"w": jnp.arange(3)}, step=0).wait()

    found = load_pytree(manager, like={"w": np.zeros(3, np.int32)})["w"]

    found += 1  # the loaded array belongs to the caller
    assert found.tolist() == [1, 2, 3]


# -- mismatches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": jnp.zeros((3, 2)), "n": 1}, r"w is an array of float32 \(2, 3\).*expected an array of float32 \(3, 2\)"),
        ({"w": jnp.zeros((2, 3), jnp.int32), "n": 1}, r"w is an array of float32 \(2, 3\).*expected an array of int32"),
        ({"w": jnp.zeros((2, 3)), "n": jnp.int32(1)}, r"n is a int in the checkpoint, expected an array of int32 \(\)"),
        ({"w": jnp.zeros((2, 3)), "n": "one"}, "n is a int in the checkpoint, expected a str"),
        ({"w": jax.random.key(0), "n": 1}, "w is a ArrayImpl in the checkpoint, expected a key of key<fry>"),
        ({"w": jnp.zeros((2, 3)), "n": 1, "b": 0}, "lacks b; the target lacks nothing"),
        ({"v": jnp.zeros((2, 3)), "n": 1}, "lacks v; the target lacks w"),
        ({"w": jnp.zeros((2, 3))}, "the target lacks n of the checkpoint; pass strict=False to ignore it"),
        ({"w": {"deeper": jnp.zeros((2, 3))}, "n": 1}, "lacks w.deeper"),
    ],
)
def test_a_mismatch_names_what_was_found_and_expected(like: Any, message: str) -> None:
    state = to_state({"w": jnp.ones((2, 3)), "n": 1})

    with pytest.raises(InvalidArgument, match=message):
        from_state(state, like=like)


def test_leaves_that_the_target_lacks_can_be_ignored(manager: CheckpointManager) -> None:
    save_pytree(manager, train_state(2), step=0).wait()

    found = load_pytree(manager, like={"params": train_state(0).params}, strict=False)

    assert_same(found, {"params": train_state(2).params})


def test_a_key_of_another_implementation_is_rejected() -> None:
    state = to_state({"rng": jax.random.key(0, impl="rbg")})

    with pytest.raises(
        InvalidArgument, match=r"rng is a key of key<rbg> \(\) in the checkpoint, expected a key of key<fry>"
    ):
        from_state(state, like={"rng": jax.random.key(0)})


def test_an_unknown_key_implementation_is_named() -> None:
    state = {"rng": {"prng_impl": "no_such", "key_data": np.zeros(2, np.uint32)}}

    with pytest.raises(InvalidArgument, match="rng is not a key of the implementation 'no_such'"):
        from_state(state, like={"rng": jax.random.key(0)})


def test_64_bit_arrays_are_not_narrowed_silently() -> None:
    like = {"w": jax.ShapeDtypeStruct((2,), np.dtype(np.float64))}

    with pytest.raises(InvalidArgument, match=r"converts to float32 \(set jax_enable_x64\)"):
        from_state({"w": np.ones(2)}, like=like)


def test_a_leaf_that_cannot_be_stored_is_rejected_by_name(manager: CheckpointManager) -> None:
    with pytest.raises(InvalidArgument, match=r"params\.apply is a builtins\.function"):
        save_pytree(manager, {"params": {"apply": lambda x: x}}, step=0)

    assert manager.list() == []


def test_two_leaves_with_one_name_are_rejected() -> None:
    class Twice:
        pass

    jax.tree_util.register_pytree_with_keys(
        Twice, lambda _: (((jax.tree_util.DictKey("1"), 1), (jax.tree_util.DictKey(1), 2)), None), lambda _, __: Twice()
    )

    with pytest.raises(InvalidArgument, match=r"two leaves of the pytree have the name a\.1"):
        to_state({"a": Twice()})


# -- invariants -----------------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), max_size=4).map(lambda numbers: np.array(numbers, np.int32)),
)
TREES = st.recursive(
    st.one_of(st.none(), LEAVES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.builds(AdamState, inner, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=20,
)


@given(TREES)
def test_any_tree_survives_the_round_trip(tree: Any) -> None:
    assert_same(from_state(to_state(tree), like=tree), tree)
