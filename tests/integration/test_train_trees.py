"""A context with JAX pytrees, which are immutable and therefore returned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata
from strata.errors import InvalidArgument
from strata.train import Context


class AdamState(NamedTuple):
    count: jax.Array
    mu: Any


class Part:
    """An object with `load_state_dict`, besides trees."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def state_of(seed: int) -> dict[str, Any]:
    params = {"kernel": jax.random.normal(jax.random.key(seed), (4, 2)), "bias": jnp.full(2, seed, jnp.bfloat16)}
    return {"params": params, "optimizer": (AdamState(jnp.int32(seed), params), None), "key": jax.random.key(seed)}


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name in ("RANK", "WORLD_SIZE", "STRATA_RUN", "STRATA_CHECKPOINT_EVERY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    made: list[Context] = []

    def make() -> Context:
        made.append(strata.init(checkpoints="ckpt", every=1, saver="thread"))
        return made[-1]

    yield make
    for context in made:
        context.close()


def test_on_a_fresh_start_the_state_is_what_was_given(contexts: Any) -> None:
    given = state_of(1)
    progress = contexts().restore(given)

    assert (progress.is_fresh, progress.state) == (True, given)


def test_trees_are_returned_with_their_types_and_the_rest_is_loaded_in_place(contexts: Any) -> None:
    context, part = contexts(), Part()
    context.restore(state_of(1))
    part.value = 7
    context.report(step=3)
    context.maybe_checkpoint({**state_of(1), "part": part}).wait()
    context.close()

    again = Part()
    progress = contexts().restore({**state_of(2), "part": again})
    state, expected = progress.state, state_of(1)
    assert progress.step == 3
    assert state["part"] is again
    assert again.value == 7
    assert isinstance(state["optimizer"][0], AdamState)
    assert jax.random.uniform(state.pop("key")) == jax.random.uniform(expected.pop("key"))
    del state["part"]
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert isinstance(found, jax.Array)
        assert found.dtype == wanted.dtype
        assert np.array_equal(np.asarray(found), np.asarray(wanted))


def test_a_tree_may_be_described_by_shapes(contexts: Any) -> None:
    context = contexts()
    context.checkpoint({"params": state_of(1)["params"]}, step=1).wait()
    context.close()

    like = jax.eval_shape(lambda: state_of(2)["params"])
    found = contexts().restore({"params": like}).state["params"]
    assert (found["kernel"] == state_of(1)["params"]["kernel"]).all()


def test_a_tree_that_does_not_fit_is_refused_by_its_leaf(contexts: Any) -> None:
    context = contexts()
    context.checkpoint({"params": {"kernel": jnp.zeros((4, 2))}}, step=1).wait()
    context.close()

    context = contexts()
    with pytest.raises(InvalidArgument, match=r"kernel is an array of float32 \(4, 2\).*expected.*\(2, 4\)"):
        context.restore({"params": {"kernel": jnp.zeros((2, 4))}})
    with pytest.raises(InvalidArgument, match="no entry 'more'"):
        context.restore({"params": {"kernel": jnp.zeros((4, 2))}, "more": jnp.zeros(1)})
    progress = context.restore({"params": {"kernel": jnp.ones((4, 2))}, "more": jnp.ones(1)}, strict=False)
    assert float(progress.state["params"]["kernel"].sum()) == 0.0
    assert float(progress.state["more"][0]) == 1.0, "the checkpoint does not contain it, so it stays unchanged"


def test_what_holds_no_arrays_of_jax_must_be_loaded_into(contexts: Any) -> None:
    """Otherwise a script that ignores `state` would continue with its old tree."""
    context = contexts()
    context.checkpoint({"numbers": {"count": 3}}, step=1).wait()

    with pytest.raises(InvalidArgument, match="'numbers' is a dict without load_state_dict"):
        context.restore({"numbers": {"count": 0}})
