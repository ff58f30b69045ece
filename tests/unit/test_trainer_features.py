"""Declarations, fields, the state and the errors of feature columns."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from strata.errors import InvalidArgument, LimitExceeded, NoData, SchemaMismatch
from strata.trainer.features import (
    DenseFeat,
    Features,
    Field,
    PortableEncoder,
    SparseFeat,
    VarLenFeat,
    auto_embedding_dim,
    columns,
    fitters,
)

ROWS: dict[str, Any] = {
    "carrier": ["AA", "UA", None, "AA"],
    "origin": [10, 30, 30, 20],
    "distance": [100.0, None, 300.0, float("nan")],
    "tags": [["a", "b"], [], None, ["a", None, "c", "a"]],
    "genres": ["x|y", "", None, "y||x|y"],
    "late": [0, 1, 1, 0],
}
COLUMNS = [
    SparseFeat("carrier"),
    SparseFeat("origin"),
    DenseFeat("distance"),
    VarLenFeat("tags"),
    VarLenFeat("genres", separator="|", combiner="sum"),
]


@pytest.fixture
def features() -> Features:
    return Features.fit(ROWS, COLUMNS, label="late")


def encoded(features: Features, rows: dict[str, Any]) -> dict[str, list[Any]]:
    return features.encode(pa.record_batch(rows)).to_pydict()


# Fields


def test_fields_describe_the_encoded_batch_to_a_model(features: Features) -> None:
    assert features.fields == (
        Field(name="carrier", kind="sparse", num_ids=4, embedding_dim=8),
        Field(name="origin", kind="sparse", num_ids=5, embedding_dim=8),
        Field(name="distance", kind="dense", width=1),
        Field(name="tags", kind="varlen", num_ids=5, embedding_dim=8, max_length=3, combiner="mean"),
        Field(name="genres", kind="varlen", num_ids=4, embedding_dim=8, max_length=3, combiner="sum"),
    )
    assert features.num_rows == 4


def test_ids_follow_the_frequency_then_the_value(features: Features) -> None:
    batch = encoded(features, ROWS)

    assert batch["sparse"] == [[2, 3], [3, 2], [0, 2], [2, 4]]
    assert batch["tags"] == [[2, 3, 0], [0, 0, 0], [0, 0, 0], [2, 4, 2]]
    assert batch["genres"] == [[3, 2, 0], [0, 0, 0], [0, 0, 0], [2, 3, 2]]
    assert batch["dense"] == [[-1.0], [0.0], [1.0], [0.0]]
    assert batch["late"] == [0, 1, 1, 0]


def test_unseen_values_are_unknown_and_missing_ones_are_zero(features: Features) -> None:
    rows = {
        "carrier": ["ZZ", None, ""],
        "origin": [-1, None, 20],
        "distance": [float("inf"), float("-inf"), 1e200],
        "tags": [["new"], [None], ["c", "new", "b", "a"]],
        "genres": ["z", "|", "|x|"],
    }

    batch = encoded(features, rows)

    assert batch["sparse"] == [[1, 1], [0, 0], [1, 4]]
    assert batch["dense"] == [[1.0], [-1.0], [1.0]]  # the largest and the smallest fitted value
    assert batch["tags"] == [[1, 0, 0], [0, 0, 0], [4, 1, 3]]
    assert batch["genres"] == [[1, 0, 0], [0, 0, 0], [3, 0, 0]]
    assert "late" not in batch  # rows to predict have no label


@pytest.mark.parametrize(("num_ids", "dim"), [(2, 8), (3, 8), (1000, 32), (10_000_000, 128), (1 << 40, 128)])
def test_an_automatic_embedding_dim_grows_with_the_fourth_root_and_is_bounded(num_ids: int, dim: int) -> None:
    assert auto_embedding_dim(num_ids) == dim


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "graph"}, "kind='graph' is unknown"),
        ({"kind": "sparse", "num_ids": 1, "embedding_dim": 4}, "num_ids=1 of field 'x' must be at least 2"),
        ({"kind": "sparse", "num_ids": 5}, "embedding_dim=0 of field 'x' must be at least 1"),
        ({"kind": "dense", "width": 0}, "width=0"),
        ({"kind": "dense", "width": 1, "num_ids": 5}, "num_ids=5 of field 'x' must be 0"),
        ({"kind": "varlen", "num_ids": 5, "embedding_dim": 4, "max_length": 3}, "combiner=None"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        Field(name="x", **options)


def test_fields_and_declarations_need_neither_pyarrow_nor_torch() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from strata.trainer.features import Field, SparseFeat, VarLenFeat, DenseFeat\n"
        "print(Field(name='x', kind='dense', width=1).width)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "1\n"


# Declarations


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: SparseFeat(""), "must be the name of a column"),
        (lambda: SparseFeat("sparse"), "name of a matrix"),
        (lambda: DenseFeat("dense"), "name of a matrix"),
        (lambda: SparseFeat("x", min_count=0), "min_count=0"),
        (lambda: SparseFeat("x", min_count=True), "min_count=True"),
        (lambda: SparseFeat("x", max_size=0), "max_size=0"),
        (lambda: SparseFeat("x", hash_buckets=0), "hash_buckets=0"),
        (lambda: SparseFeat("x", hash_buckets=1.5), "hash_buckets=1.5"),  # type: ignore[arg-type]
        (lambda: SparseFeat("x", embedding_dim="large"), "embedding_dim='large'"),  # type: ignore[arg-type]
        (lambda: SparseFeat("x", vocabulary="abc"), "not a list of values"),
        (lambda: SparseFeat("x", vocabulary=[]), "is empty"),
        (lambda: SparseFeat("x", vocabulary=["a", None]), "has None"),
        (lambda: SparseFeat("x", vocabulary=["a", "a"]), "1 of them distinct"),
        (lambda: SparseFeat("x", vocabulary=[["a"]]), r"has \['a'\]"),
        (lambda: SparseFeat("x", vocabulary=["a"], hash_buckets=5), "leave out one"),
        (lambda: SparseFeat("x", vocabulary=["a"], min_count=2), "leave them out with vocabulary="),
        (lambda: SparseFeat("x", hash_buckets=9, max_size=2), "leave them out with hash_buckets="),
        (lambda: DenseFeat("x", scale="robust"), "scale='robust'"),  # type: ignore[arg-type]
        (lambda: DenseFeat("x", fill="zero"), "fill='zero'"),  # type: ignore[arg-type]
        (lambda: DenseFeat("x", fill=float("inf")), "fill=inf"),
        (lambda: DenseFeat("x", width=0), "width=0"),
        (lambda: VarLenFeat("x", separator=""), "separator=''"),
        (lambda: VarLenFeat("x", max_length=0), "max_length=0"),
        (lambda: VarLenFeat("x", combiner="first"), "combiner='first'"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_declaration_is_refused_with_the_value_and_the_cure(make: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        make()


def test_a_declaration_takes_numpy_values_as_plain_ones() -> None:
    declared = SparseFeat("x", vocabulary=np.array([3, 1]), embedding_dim=np.int64(8))

    assert declared.vocabulary == (3, 1)
    assert type(declared.embedding_dim) is int
    assert dataclasses.replace(declared, name="y").name == "y"


@pytest.mark.parametrize(
    ("declared", "options", "problem"),
    [
        ([], {}, "is not a list of features"),
        (SparseFeat("carrier"), {}, "is not a list of features"),
        (["carrier"], {}, r"declare it as SparseFeat\('carrier'\)"),
        ([SparseFeat("carrier"), DenseFeat("carrier")], {}, "declares 'carrier' twice"),
        ([SparseFeat("late")], {"label": "late"}, "must not see its label"),
        ([SparseFeat("carrier")], {"passthrough": ["dense"]}, "column 'dense' has the name of a matrix"),
        ([SparseFeat("carrier")], {"loader_options": {"shuffle": True}}, "has 'shuffle', which does not apply"),
    ],
)
def test_declarations_that_conflict_are_refused(declared: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        Features.fit(ROWS, declared, **options)


# Types that do not fit


@pytest.mark.parametrize(
    ("declared", "values", "problem"),
    [
        (SparseFeat("x"), [["a"], ["b"]], r"declare it as VarLenFeat\('x'\)"),
        (SparseFeat("x"), [{"a": 1}], "has no categories"),
        (SparseFeat("x"), pa.array([1, 2]).cast(pa.decimal128(22, 2)), "declare it as DenseFeat, or cast"),
        (SparseFeat("x"), [1.0, 2.5], r"has the value 2.5, which is not a category; declare it as DenseFeat"),
        (SparseFeat("x", hash_buckets=9), [1.0, 2.5], "has the value 2.5, which is not a category"),
        (SparseFeat("x"), pa.array([2.5]).dictionary_encode(), "has the value 2.5, which is not a category"),
        (SparseFeat("x"), [None, None], "has no value in any row"),
        (SparseFeat("x"), pa.array([None, None], pa.string()), "has no value in any row"),
        (SparseFeat("x", min_count=3), ["a", "b", "a"], "lower min_count"),
        (SparseFeat("x", vocabulary=["a"]), [1, 2], "does not fit its column, which has integers"),
        (SparseFeat("x", vocabulary=[1]), ["a"], "does not fit its column, which has text"),
        (SparseFeat("x", vocabulary=[-1]), pa.array([1], pa.uint64()), "cannot hold"),
        (SparseFeat("x", vocabulary=["a", b"b"]), ["a"], "does not fit its column"),
        (DenseFeat("x"), ["a", "b"], r"not a number; declare it as SparseFeat\('x'\)"),
        (DenseFeat("x"), [[1.0], [2.0]], "pass width="),
        (DenseFeat("x", width=2), [1.0, 2.0], "leave out width="),
        (DenseFeat("x", width=2), [["a", "b"]], "not a number"),
        (DenseFeat("x", width=2), [[1.0, 2.0], [3.0]], "a list of 1 numbers, but width=2"),
        (DenseFeat("x"), pa.array([None, None], pa.float64()), "has no value in any row"),
        (DenseFeat("x"), [float("nan"), float("inf")], "has no value in any row"),
        (VarLenFeat("x"), ["a|b"], r"pass separator= to split it, or declare it as SparseFeat\('x'\)"),
        (VarLenFeat("x"), [1, 2], r"not a list; declare it as SparseFeat\('x'\)"),
        (VarLenFeat("x", separator="|"), [["a"]], "leave out separator="),
        (VarLenFeat("x", separator="|"), [1], r"declare it as SparseFeat\('x'\)"),
        (VarLenFeat("x"), [[["a"]]], "has no categories"),
    ],
)
def test_a_column_that_does_not_fit_its_declaration_is_refused_with_the_cure(
    declared: Any, values: Any, problem: str
) -> None:
    with pytest.raises((SchemaMismatch, InvalidArgument), match=problem):
        Features.fit({"x": values}, [declared])


def test_an_unknown_column_is_refused_with_a_similar_name() -> None:
    with pytest.raises(SchemaMismatch, match="did you mean 'carrier'"):
        Features.fit(ROWS, [SparseFeat("carier")])
    with pytest.raises(SchemaMismatch, match="no column 'lates'"):
        Features.fit(ROWS, COLUMNS, label="lates")


def test_too_many_distinct_values_are_refused_with_hash_buckets_as_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitters, "MAX_VALUES", 5)
    rows = {"x": [f"user {number}" for number in range(6)]}

    with pytest.raises(LimitExceeded, match=r"'x' has more than 5 distinct values.*hash_buckets="):
        Features.fit(rows, [SparseFeat("x")])

    assert Features.fit(rows, [SparseFeat("x", max_size=6)]).fields[0].num_ids == 8  # raises the limit
    assert Features.fit(rows, [SparseFeat("x", hash_buckets=3)]).fields[0].num_ids == 5


def test_no_rows_are_refused() -> None:
    with pytest.raises(NoData, match="no rows"):
        Features.fit({"x": pa.array([], pa.int64())}, [DenseFeat("x")])


def test_data_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="data is a int"):
        Features.fit(3, [SparseFeat("x")])


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(SchemaMismatch, match="cannot be converted to Arrow"):
        Features.fit({"x": [1, 2], "y": [1]}, [SparseFeat("x"), SparseFeat("y")])


def test_a_batch_without_a_column_or_with_another_type_is_refused(features: Features) -> None:
    batch = pa.record_batch(ROWS)

    with pytest.raises(SchemaMismatch, match="no column 'origin'"):
        features.encode(batch.drop_columns(["origin"]))
    for name, values in {"carrier": [1] * 4, "origin": ["a"] * 4, "distance": ["a"] * 4, "tags": [1] * 4}.items():
        place = batch.schema.get_field_index(name)
        with pytest.raises(SchemaMismatch, match=f"column '{name}' is .*fit the features again"):
            features.encode(batch.set_column(place, name, pa.array(values)))


# Options


def test_min_count_and_max_size_choose_the_vocabulary_and_count_the_rest() -> None:
    rows = {"x": list("aaabbccd")}

    at_least_two = Features.fit(rows, [SparseFeat("x", min_count=2)])
    two = Features.fit(rows, [SparseFeat("x", max_size=2)])

    assert at_least_two.state()["columns"][0]["vocabulary"] == ["a", "b", "c"]
    assert at_least_two.state()["columns"][0]["num_unknown"] == 1
    assert two.state()["columns"][0]["vocabulary"] == ["a", "b"]
    assert two.state()["columns"][0]["num_unknown"] == 3


def test_a_given_vocabulary_keeps_its_order_and_counts_unknown_values() -> None:
    features = Features.fit({"x": ["c", "a", "q", None]}, [SparseFeat("x", vocabulary=["b", "a", "c"])])

    assert encoded(features, {"x": ["a", "b", "c", "q", None]})["sparse"] == [[3], [2], [4], [1], [0]]
    assert features.state()["columns"][0]["num_unknown"] == 1


def test_a_given_vocabulary_may_have_dates() -> None:
    days = [dt.date(2024, 1, 1), dt.date(2024, 2, 1)]
    features = Features.fit({"x": days}, [SparseFeat("x", vocabulary=days[::-1])])

    assert encoded(features, {"x": days})["sparse"] == [[3], [2]]


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [("standard", [-1.0, 1.0]), ("minmax", [0.0, 1.0]), ("log", [-1.0, 1.0]), (None, [2.0, 8.0])],
)
def test_scales(scale: Any, wanted: list[float]) -> None:
    features = Features.fit({"x": [2.0, 8.0]}, [DenseFeat("x", scale=scale)])

    assert np.ravel(encoded(features, {"x": [2.0, 8.0]})["dense"]).tolist() == pytest.approx(wanted)


def test_the_log_scale_is_symmetric_and_takes_negative_numbers() -> None:
    features = Features.fit({"x": [-7.0, 0.0, 7.0]}, [DenseFeat("x", scale="log")])

    low, middle, high = np.ravel(encoded(features, {"x": [-7.0, 0.0, 7.0]})["dense"])
    assert (middle, low) == (0.0, -high)


def test_a_fill_value_is_scaled_like_any_other() -> None:
    features = Features.fit({"x": [0.0, 10.0, None]}, [DenseFeat("x", scale="minmax", fill=5)])

    assert encoded(features, {"x": [None, float("nan")]})["dense"] == [[0.5], [0.5]]


def test_a_constant_column_becomes_zero() -> None:
    for scale in ("standard", "minmax", "log"):
        features = Features.fit({"x": [3, 3, None]}, [DenseFeat("x", scale=scale)])
        assert encoded(features, {"x": [3, None]})["dense"] == [[0.0], [0.0]]


def test_a_column_without_numbers_needs_no_statistics_if_nothing_depends_on_them() -> None:
    features = Features.fit({"x": pa.array([None, None], pa.int32())}, [DenseFeat("x", scale=None, fill=3)])

    assert encoded(features, {"x": [None, 7, float("inf")]})["dense"] == [[3.0], [7.0], [3.0]]


def test_numbers_beyond_float32_stay_finite() -> None:
    features = Features.fit({"x": [-1e140, 1e140]}, [DenseFeat("x", scale=None)])

    found = encoded(features, {"x": [1e140, -1e140]})["dense"]
    assert found == [[float(np.finfo(np.float32).max)], [float(np.finfo(np.float32).min)]]


def test_a_wide_dense_feature_is_scaled_as_one() -> None:
    rows = {"x": [[0.0, 10.0], None, [4.0, None]], "y": [1.0, 2.0, 3.0]}
    features = Features.fit(rows, [DenseFeat("x", width=2, scale="minmax", fill=5), DenseFeat("y", scale=None)])

    assert encoded(features, rows)["dense"] == [[0.0, 1.0, 1.0], [0.5, 0.5, 2.0], [pytest.approx(0.4), 0.5, 3.0]]
    assert [field.width for field in features.fields] == [2, 1]


def test_the_default_max_length_is_the_longest_list_up_to_64() -> None:
    assert Features.fit({"x": [[1], [1, 2, None]]}, [VarLenFeat("x")]).fields[0].max_length == 2
    assert Features.fit({"x": [list(range(100))]}, [VarLenFeat("x")]).fields[0].max_length == 64
    assert columns.MAX_FITTED_LENGTH == 64


# Data in memory


def test_all_kinds_of_data_in_memory_give_the_same_features() -> None:
    rows = {"c": ["b", "a", None, "b"], "n": [1, 2, 3, 4], "y": [0, 1, 0, 1]}
    declared = [SparseFeat("c"), DenseFeat("n")]
    table = pa.table(rows)
    datas = [
        rows,
        {"c": np.array(rows["c"], object), "n": torch.tensor(rows["n"]), "y": np.array(rows["y"])},
        table,
        pa.concat_tables([table.slice(0, 1), table.slice(1)]),
        pa.record_batch(rows),
        pd.DataFrame(rows),
        pd.DataFrame(rows, index=list("wxyz")),
    ]

    states = [Features.fit(data, declared, label="y").state() for data in datas]

    assert all(state == states[0] for state in states)


def test_a_matrix_in_memory_is_a_wide_feature() -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(3, 2)

    for data in (matrix, torch.from_numpy(matrix)):
        features = Features.fit({"x": data}, [DenseFeat("x", width=2, scale=None)])
        assert features.state()["columns"][0]["max"] == 5.0


def test_filters_choose_the_rows_to_fit_on_and_may_use_other_columns() -> None:
    rows = {"x": ["a", "b", "c"], "day": [1, 2, 3]}

    features = Features.fit(rows, [SparseFeat("x")], filters="day < 3")

    assert features.num_rows == 2
    assert features.state()["columns"][0]["vocabulary"] == ["a", "b"]


# The state


def test_state_is_plain_json_and_restores_the_features(features: Features, tmp_path: Path) -> None:
    state = json.loads(json.dumps(features.state(), allow_nan=False))
    features.save(tmp_path / "features.json")

    for same in (
        Features.from_state(state),
        Features.load(tmp_path / "features.json"),
        pickle.loads(pickle.dumps(features)),
    ):
        assert same.state() == features.state()
        assert same.fields == features.fields
        assert same.encode(pa.record_batch(ROWS)).equals(features.encode(pa.record_batch(ROWS)))
    assert [path.name for path in tmp_path.iterdir()] == ["features.json"]


def test_bytes_and_large_integers_survive_the_state() -> None:
    rows = {"b": [b"\x00\xff", b""], "u": pa.array([2**64 - 1, 0], pa.uint64()), "i": [-(2**63), 2**63 - 1]}
    features = Features.fit(rows, [SparseFeat(name) for name in rows])
    again = Features.from_state(json.loads(json.dumps(features.state())))

    assert again.encode(pa.record_batch(rows)).to_pydict()["sparse"] == [[3, 3, 2], [2, 2, 3]]


def broken(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    changed["columns"][0] |= changes
    return changed


def test_a_broken_state_is_refused_with_the_entry(features: Features) -> None:
    state = features.state()
    column = state["columns"]
    for bad, problem in (
        ({}, "not the state of features"),
        ([], "not the state of features"),
        (state | {"version": 2}, "version 2, but this code reads versions 1 to 1"),
        (state | {"version": "1"}, "version '1'"),
        (state | {"columns": []}, "no 'columns'"),
        (state | {"columns": [{}]}, "has no name"),
        (state | {"columns": [column[0], column[0]]}, "a column twice"),
        (state | {"num_rows": None}, "no 'num_rows'"),
        (broken(state, kind="graph"), "unknown kind 'graph'"),
        (broken(state, values=["text"]), r"'carrier' has values=\['text'\]"),
        (broken(state, embedding_dim=0), "embedding_dim=0"),
        (broken(state, vocabulary=None), "either a vocabulary or hash_buckets"),
        (broken(state, vocabulary=["a", 1]), "has 1, but must have distinct values of type str"),
        (broken(state, vocabulary=["a", "a"]), "a value twice"),
        (broken(state, values="bytes", vocabulary=["xy"]), "hex"),
        (broken(state, values="integer", vocabulary=[2**70]), "int"),
        (state | {"columns": [column[2] | {"divisor": 0.0}]}, "zero divisor"),
        (state | {"columns": [column[2] | {"fill": float("nan")}]}, "fill=nan"),
        (state | {"columns": [column[3] | {"max_length": 0}]}, "max_length=0"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            Features.from_state(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="either a vocabulary or hash_buckets"):
        PortableEncoder.from_state(broken(state, vocabulary=None))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "features.json").write_text("{")

    with pytest.raises(InvalidArgument, match="is not JSON"):
        Features.load(tmp_path / "features.json")


def test_passthrough_can_be_changed_after_fitting(features: Features) -> None:
    weighted = features.with_passthrough("late", "weight")

    assert weighted.columns_read == ["carrier", "origin", "distance", "tags", "genres", "late", "weight"]
    assert features.columns_read[-1] == "late"
    with pytest.raises(InvalidArgument, match="must not see its label"):
        features.with_passthrough("carrier")


def test_print_shows_one_line_per_feature(features: Features) -> None:
    assert str(features).splitlines() == [
        "5 features, fitted on 4 rows",
        "name      kind        ids  dim  unknown  missing  min  mean  max",
        "carrier   sparse        4    8      0 %     25 %",
        "origin    sparse        5    8      0 %      0 %",
        "distance  dense                             50 %  100   200  300",
        "tags      varlen × 3    5    8      0 %     50 %",
        "genres    varlen × 3    4    8      0 %     50 %",
    ]


def test_an_unknown_name_is_an_attribute_error() -> None:
    import strata.trainer.features as package

    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = package.Nonsense
    assert "Features" in dir(package)
