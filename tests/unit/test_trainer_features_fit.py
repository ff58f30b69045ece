"""Fitting gives the same features for any order of rows, size of batches and number of threads."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.trainer.features import DenseFeat, Features, SparseFeat, VarLenFeat, scan
from strata.trainer.features.fitters import make_fitter

SCHEMA = pa.schema(
    {
        "city": pa.string(),
        "code": pa.dictionary(pa.int8(), pa.string()),
        "user": pa.int64(),
        "flag": pa.bool_(),
        "price": pa.float64(),
        "size": pa.float32(),
        "tags": pa.list_(pa.string()),
        "path": pa.string(),
    }
)
ROW = st.fixed_dictionaries(
    {
        "city": st.sampled_from(["Rom", "Zürich", "", "O'Hare", None]),
        "code": st.sampled_from(["a", "b", "c", None]),
        "user": st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1) | st.none(),
        "flag": st.booleans() | st.none(),
        "price": st.floats() | st.none(),
        "size": st.floats(width=32) | st.none(),
        "tags": st.lists(st.sampled_from(["x", "y", "z", None]), max_size=4) | st.none(),
        "path": st.text(alphabet="ab/", max_size=6) | st.none(),
    }
)
FULL: dict[str, Any] = {
    "city": "Rom", "code": "a", "user": 1, "flag": True, "price": 1.5, "size": 2.0, "tags": ["x"], "path": "a/b"
}  # fmt: skip
COLUMNS = [
    SparseFeat("city", max_size=3),
    SparseFeat("code", vocabulary=["c", "a"]),
    SparseFeat("user"),
    SparseFeat("flag"),
    DenseFeat("price"),
    DenseFeat("size", scale="log"),
    VarLenFeat("tags"),
    VarLenFeat("path", separator="/", hash_buckets=50),
]


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, SCHEMA)


@given(st.lists(ROW, max_size=12).flatmap(lambda rows: st.tuples(st.just(rows), st.permutations([FULL, *rows]))),
       st.data())  # fmt: skip
def test_order_batches_and_threads_do_not_change_the_state(
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]], data: st.DataObject
) -> None:
    rows, permuted = found
    wanted = Features.fit(table_of([FULL, *rows]), COLUMNS, num_workers=1).state()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(permuted)))) | {0, len(permuted)})
    batches = [table_of(permuted[first:last]) for first, last in itertools.pairwise(cuts)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scan, "_SLICE_ROWS", data.draw(st.integers(1, 5)))
        state = Features.fit(pa.concat_tables(batches), COLUMNS, num_workers=data.draw(st.integers(1, 3))).state()

    assert state == wanted


@given(st.lists(st.sampled_from("abcde") | st.none(), min_size=1).filter(any), st.integers(1, 2))
def test_a_vocabulary_has_the_counts_of_the_data(rows: list[str | None], min_count: int) -> None:
    rows += ["a", "a"]
    present = [row for row in rows if row is not None]
    kept = {value: count for value, count in Counter(present).items() if count >= min_count}

    column = Features.fit({"x": rows}, [SparseFeat("x", min_count=min_count)], num_workers=1).state()["columns"][0]

    assert column["vocabulary"] == sorted(kept, key=lambda value: (-kept[value], value))
    assert column["num_missing"] == len(rows) - len(present)
    assert column["num_unknown"] == len(present) - sum(kept.values())


@given(st.lists(st.floats(-1e100, 1e100), min_size=1), st.lists(st.sampled_from([None, math.nan, math.inf, -math.inf])))
def test_dense_statistics_are_those_of_the_finite_values(values: list[float], others: list[float | None]) -> None:
    column = Features.fit({"x": pa.array([*values, *others], pa.float64())}, [DenseFeat("x")]).state()["columns"][0]

    assert (column["min"], column["max"]) == (min(values), max(values))
    assert column["mean"] == float(sum(map(Fraction, values)) / len(values))
    assert column["std"] == pytest.approx(statistics.pstdev(map(Fraction, values)), rel=1e-15)
    assert column["num_missing"] == sum(other is None or math.isnan(other) for other in others)


def test_unused_values_of_a_dictionary_are_not_counted() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([2, 2, None, 0], pa.int8()), ["a", "unused", "c", None])

    state = Features.fit({"x": array}, [SparseFeat("x")]).state()["columns"][0]

    assert state["vocabulary"] == ["c", "a"]
    assert state["num_missing"] == 1


def test_the_shares_of_missing_values_are_right_for_every_kind_of_column() -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), ["a", None])
    for declared, values, num_missing in (
        (SparseFeat("x", hash_buckets=3), texts, 2),
        (SparseFeat("x"), texts, 2),
        (SparseFeat("x", vocabulary=["a"]), texts, 2),
        (SparseFeat("x", hash_buckets=3), [1.0, math.nan, None], 2),
        (SparseFeat("x"), pa.array([1.0, math.nan, None]), 2),
        (DenseFeat("x"), pa.array([1.0, math.nan, None]), 2),
        (VarLenFeat("x"), [["a"], [None], None], 2),
        (VarLenFeat("x", separator=","), ["a", ",", None], 2),
    ):
        assert Features.fit({"x": values}, [declared]).state()["columns"][0]["num_missing"] == num_missing


def test_empty_batches_change_nothing() -> None:
    table = table_of([FULL])
    for column in COLUMNS:
        fitter = make_fitter(column, SCHEMA.field(column.name).type)
        for batch in (table.slice(0, 0), table, table.slice(0, 0)):
            fitter.observe(batch[column.name].combine_chunks())
        assert fitter.finish().state() == Features.fit(table, [column]).state()["columns"][0]


def test_an_empty_batch_is_encoded_as_one() -> None:
    features = Features.fit(table_of([FULL]), COLUMNS)

    assert features.encode(pa.RecordBatch.from_pylist([], SCHEMA)).num_rows == 0


def test_many_rows_agree_with_a_count_in_numpy() -> None:
    random = np.random.default_rng(3)
    rows = {
        "near": random.integers(0, 1000, 300_000),
        "far": random.integers(0, 1000, 300_000) * 10**15,
        "text": pa.array(random.integers(0, 1000, 300_000)).cast(pa.string()),
    }

    features = Features.fit(rows, [SparseFeat(name) for name in rows])

    for name, column in zip(rows, features.state()["columns"], strict=True):
        values, counts = np.unique(np.asarray(rows[name]), return_counts=True)
        order = sorted(range(len(values)), key=lambda place: (-counts[place], values[place]))
        assert column["vocabulary"] == [values[place] for place in order]
    batch = features.encode(pa.record_batch({name: pa.array(values) for name, values in rows.items()}))
    ids = np.asarray(batch.column("sparse").flatten()).reshape(-1, 3)
    assert np.array_equal(features.state()["columns"][1]["vocabulary"], np.array(rows["far"])[
        [np.argmax(ids[:, 1] == number) for number in range(2, 1002)]])  # fmt: skip
