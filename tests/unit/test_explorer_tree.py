"""Lists, trees, lineage and rankings, without any file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.format.dtypes import BY_NAME
from strata.checkpoint.format.manifest import CheckpointType, Manifest, TensorEntry
from strata.checkpoint.load.statistics import Statistics, of_bytes
from strata.checkpoint.tools import diff
from strata.clock import ManualClock
from strata.dashboard.explorer import timeline, tree
from strata.dashboard.explorer.change import Change, aligned, at_least, rank
from strata.dashboard.explorer.limits import Budget, ExplorerConfig
from strata.dashboard.explorer.values import plain_values
from strata.errors import ConfigError, ReadTooLarge, TransferCancelled


def entry(name: str, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> TensorEntry:
    return TensorEntry(name=name, dtype=dtype, shape=shape, slices=())


def known(values: list[float]) -> Statistics:
    found = of_bytes(np.array(values, np.float64).view(np.uint8), BY_NAME["F64"])
    assert found is not None
    return found


# -- trees ---------------------------------------------------------------------------------------------------------


def test_children_are_groups_and_tensors_in_the_order_of_the_checkpoint() -> None:
    names = ["model.b.w", "model.a", "model.b.v", "optimizer.x", "model", "step"]

    top = tree.children(map(entry, names), {}, None)
    below = tree.children(map(entry, names), {}, "model")

    assert [(node.label, node.tensor is None, node.num_tensors) for node in top] == [
        ("model", True, 3),
        ("optimizer", True, 1),
        ("model", False, 1),
        ("step", False, 1),
    ]
    assert [(node.path, node.num_tensors, node.num_bytes) for node in below] == [("model.b", 2, 16), ("model.a", 1, 8)]


NAMES = st.lists(st.text("ab.<>/\\\0\u202e", max_size=8), unique=True, max_size=20)


@given(NAMES)
def test_every_tensor_of_any_name_is_reached_once_through_the_tree(names: list[str]) -> None:
    tensors = [entry(name) for name in names]

    def reached(under: str | None) -> Iterator[str]:
        for node in tree.children(tensors, {}, under):
            if node.tensor is None:
                yield from reached(node.path)
            else:
                yield node.tensor.name

    assert sorted(reached(None)) == sorted(names)


def test_a_group_sums_its_nan_and_does_not_know_them_if_one_tensor_has_no_statistics() -> None:
    tensors = [entry("a.x"), entry("a.y"), entry("b.z")]
    statistics = {"a.x": known([np.nan, 1.0]), "a.y": known([np.nan, np.inf])}

    a, b = tree.children(tensors, statistics, None)

    assert (a.num_nan, a.num_inf) == (2, 1)
    assert (b.num_nan, b.num_inf) == (None, None)


def test_numbers_in_names_sort_by_value() -> None:
    names = ["layers.10.w", "layers.2.w", "layers.2", "head", "layers.²"]

    assert sorted(names, key=tree.natural_key) == ["head", "layers.2", "layers.2.w", "layers.10.w", "layers.²"]


@pytest.mark.parametrize(
    ("search", "under", "found"),
    [("WEIGHT", None, True), ("*.weight", None, True), ("0.*", None, False), ("", "model", True), ("", "mod", False)],
)
def test_a_search_is_a_part_of_the_name_or_a_pattern(search: str, under: str | None, found: bool) -> None:
    assert tree.matches("model.0.weight", search=search, under=under) is found


@pytest.mark.parametrize(
    ("values", "properties"),
    [
        ([1.0, np.nan], {"nan", "not_finite"}),
        ([1.0, np.inf], {"inf", "not_finite"}),
        ([2.0, 2.0], {"constant"}),
        ([0.0, -0.0], {"constant", "zero"}),
        ([np.nan, np.nan], {"nan", "not_finite"}),
        ([1.0, 2.0], set()),
    ],
)
def test_statistics_show_properties(values: list[float], properties: set[str]) -> None:
    one = known(values)
    every: list[tree.Property] = ["nan", "inf", "not_finite", "constant", "zero"]

    assert {wanted for wanted in every if tree.has_property(one, wanted)} == properties


def test_the_standard_deviation_follows_from_mean_and_norm() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 1_000).tolist()

    assert tree.std_of(known([*values, np.nan])) == pytest.approx(np.std(values))
    assert tree.std_of(known([np.nan])) is None


# -- lineage -------------------------------------------------------------------------------------------------------


def manifest(name: str, step: int, created_at_s: float, parent: str = "") -> Manifest:
    return Manifest(
        id=name,
        step=step,
        epoch=0,
        type=CheckpointType.FULL,
        created_at_s=created_at_s,
        num_ranks=1,
        chunk_bytes=1,
        parent=parent,
        files=(),
        tensors=(),
        structures=(),
        structure_of_rank=(),
        full_bytes=0,
        written_bytes=0,
        model_hash="",
    )


def test_a_step_back_begins_a_branch_and_deltas_are_children_of_their_base() -> None:
    found = timeline.lineage(
        [manifest("a", 10, 1.0), manifest("b", 20, 2.0, "a"), manifest("d", 15, 4.0, "a"), manifest("c", 20, 3.0)]
    )

    assert {name: one.branch for name, one in found.items()} == {"a": 0, "b": 0, "c": 0, "d": 1}
    assert found["a"].children == ("b", "d")


# -- changes -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_pieces_of_two_sizes_are_aligned(one: list[int], other: list[int]) -> None:
    total = min(sum(one), sum(other))
    data = np.arange(total, dtype=np.uint8)

    def cut(sizes: list[int]) -> Iterator[tuple[int, Any]]:
        at = 0
        for size in [*sizes, total]:
            if at < total:
                yield at, data[at : at + size]
                at += size

    pairs = list(aligned(cut(one), cut(other)))

    assert np.concatenate([a for a, _ in pairs]).tolist() == data.tolist()
    assert all((a == b).all() for a, b in pairs)


@given(st.sampled_from(["F32", "F64", "BF16", "F16", "I64", "U8", "BOOL", "C64"]), st.integers(1, 50))
def test_a_difference_has_the_norm_that_numpy_computes(name: str, size: int) -> None:
    dtype = BY_NAME[name]
    random = np.random.default_rng(size)
    small = name in ("U8", "BOOL", "I64")
    values = [random.integers(0, 2, size) if small else random.normal(size=size) for _ in range(2)]
    if name == "BF16":
        one, other = ((side.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for side in values)
        wide = [(side.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for side in (one, other)]
    else:
        one, other = (side.astype(dtype.numpy) for side in values)
        wide = [side.astype(np.complex128) for side in (one, other)]

    found = diff.difference(entry("w", (size,), name), [(one.view(np.uint8), other.view(np.uint8))])

    assert found.l2 == pytest.approx(np.linalg.norm(wide[1] - wide[0]))
    assert found.num_different == np.count_nonzero(one != other)


def test_the_largest_relative_change_ranks_first_and_a_change_from_zero_before_it() -> None:
    changes = [
        Change("same"),
        Change("added"),
        Change("changed", at_least=0.5),
        Change("changed", relative_l2=0.1, num_different=1),
        Change("changed", relative_l2=None, num_different=1),
        Change("changed"),
    ]

    assert sorted(changes, key=rank) == [changes[4], changes[2], changes[3], changes[5], changes[1], changes[0]]


def test_norms_bound_the_relative_change_from_below() -> None:
    old, new = np.array([3.0, 4.0]), np.array([0.0, 10.0])

    bound = at_least(known(old.tolist()), known(new.tolist()))

    assert bound == pytest.approx(1.0)
    assert bound <= np.linalg.norm(new - old) / np.linalg.norm(old)
    assert at_least(known([0.0]), known([1.0])) is None
    assert at_least(known([1.0, np.nan]), known([1.0, 2.0])) is None


# -- values and limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "array", "expected"),
    [
        ("F32", np.array([0.1, np.nan, -np.inf], np.float32), [0.1, "NaN", "-Infinity"]),
        ("I64", np.array([2**53 + 1, -1]), ["9007199254740993", -1]),
        ("BOOL", np.array([True, False]), [True, False]),
        ("BF16", np.array([0x3F80, 0x7F80], np.uint16), [1.0, "Infinity"]),
        ("F8_E4M3", np.array([0x38, 0x7F], np.uint8), [1.0, "NaN"]),
        ("C64", np.array([1 + 2j], np.complex64), ["1+2j"]),
    ],
)
def test_values_are_exact_in_json(dtype: str, array: Any, expected: list[Any]) -> None:
    assert plain_values(array.view(np.uint8), dtype) == expected


def test_a_budget_refuses_more_bytes_and_more_time_and_names_the_setting() -> None:
    clock = ManualClock()
    budget = Budget(ExplorerConfig(max_read_bytes=100, request_timeout_s=5.0, scan_s=1.0), clock)

    budget.charge(60, "tensor 'w'")
    with pytest.raises(ReadTooLarge, match=r"tensor 'v' needs 120 bytes, more than max_read_bytes=100"):
        budget.charge(60, "tensor 'v'")
    assert not budget.is_scan_over()
    clock.advance(1.5)
    assert budget.is_scan_over()
    budget.check()
    clock.advance(4.0)
    with pytest.raises(ReadTooLarge, match="request_timeout_s=5"):
        budget.check()


def test_a_cancelled_budget_stops_the_reader() -> None:
    budget = Budget(ExplorerConfig(), ManualClock())

    budget.cancel()

    with pytest.raises(TransferCancelled):
        budget.check()


@pytest.mark.parametrize(("name", "value"), [("max_read_bytes", 0), ("num_readers", -1), ("scan_s", 100.0)])
def test_a_limit_that_makes_no_sense_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ExplorerConfig(**{name: value})  # type: ignore[arg-type]
